"""From a configuration to the dispatcher's fixed choices: the one place where names become objects."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from configs.load import ConfigError
from configs.root import Config
from configs.strategy import Advantage
from engine import strategies
from engine.core.advantage import AdvantageRule
from engine.core.arm import UNLIMITED
from engine.core.futility import Threshold
from engine.core.policy import Futility, Policy, Unresolved
from engine.core.staleness import Bound
from engine.core.strategy import Strategy
from engine.futility_table import solve
from engine.profiles import load_law
from engine.strategies.refusals import FILTERS, check_signal

Choice = TypeVar("Choice", bound=str)

PRESETS = {
    "ada": AdvantageRule(),
    "grpo": AdvantageRule(baseline="kept", divides_by_std=True),
    "drgrpo": AdvantageRule(baseline="kept"),
    "rloo": AdvantageRule(baseline="leave_one_out"),
    "remax": AdvantageRule(baseline="greedy"),
    "reinforce++": AdvantageRule(baseline="zero", whiten=True),
    "reinforce++_baseline": AdvantageRule(baseline="kept", whiten=True),
    "maxrl": AdvantageRule(weight="maxrl"),
    "raft": AdvantageRule(baseline="zero"),
    "signed": AdvantageRule(baseline="signed"),
    "anchored": AdvantageRule(baseline="history", centring="anchor_pos"),
    "hybrid": AdvantageRule(weight="inverse_sqrt", epsilon=1e-3),
}
OWN_ADVANTAGE = {"raft": "raft", "reject": "signed", "giveup": "anchored", "estimate": "hybrid"}
"""What `advantage.name = "auto"` means for a strategy; `ada` for all others."""
OWN_UNRESOLVED: dict[str, Unresolved] = {"fixed": "keep", "filter": "shrink", "rounds": "keep"}
"""What `strategy.unresolved = "auto"` means for a strategy; `drop` for all others."""


def make_policy(config: Config) -> Policy:
    """What `config` says about sampling.

    Raises:
        ConfigError: a user's strategy that cannot be loaded, an advantage that makes no sense with its strategy, a
            futility table that cannot be solved, or stages whose strategies mean different things by `auto`.
        DataError: a futility prior that cannot be read.
    """
    own, names = config.strategy, [strategy.name for strategy in config.strategies]
    strategy = strategies.build(own, config)
    unresolved = own.unresolved
    if unresolved == "auto":
        meanings: dict[str, Unresolved] = {name: OWN_UNRESOLVED.get(name, "drop") for name in names}
        unresolved = _same("strategy.unresolved", meanings)
    stages = tuple(
        (stage.from_step, strategies.build(stage.strategy, config))
        for stage in config.schedule
        if stage.from_step and stage.strategy is not None
    )
    rule = _rule(config.advantage, names)
    used = list(zip(names, [strategy, *(later for _, later in stages)], strict=True))
    for name, built in used:
        check_signal(name, built, rule)
    if rule.whiten:
        _check_whitening(config, used, rule)
    return Policy(
        strategy=strategy,
        bound=Bound(config.staleness.max, config.learner.groups_per_step),
        seed=config.run.seed,
        accounting=own.accounting,
        fixed_width=own.width,
        at_exit=own.at_exit,
        max_tokens_per_visit=own.max_tokens_per_visit or UNLIMITED,
        max_tokens_per_step=config.learner.max_tokens_per_step,
        # A width above need would reach across the end of a round.
        raise_by_deadline=own.raise_by_deadline and "rounds" not in names,
        max_failures=config.worker.max_sample_failures,
        rule=rule,
        unresolved=unresolved,
        requeue_after=own.requeue_after,
        futility=_futility(config, strategy),
        visit_decay=config.history.visit_decay,
        version_decay=config.history.version_decay,
        stages=stages,
    )


def advantage_rule(config: Advantage, strategy: str) -> AdvantageRule:
    """The strategy's own rule, a preset, or what the keys say."""
    name = OWN_ADVANTAGE.get(strategy, "ada") if config.name == "auto" else config.name
    if name != "custom":
        return PRESETS[name]
    return AdvantageRule(
        baseline=config.baseline,
        divides_by_std=config.divide_by_std,
        weight=config.weight,
        max_weight=config.max_weight,
        epsilon=config.epsilon,
        centring=config.centring,
        whiten=config.whiten,
    )


def _check_whitening(config: Config, used: Sequence[tuple[str, Strategy]], rule: AdvantageRule) -> None:
    """Refuse strategies that leave nothing to compare, or that filter what always has a signal.

    Args:
        config: The run's.
        used: Name and strategy of the run and of its stages.
        rule: One that whitens.

    Raises:
        ConfigError: which key, and what to use instead.
    """
    own, batch = config.strategy, config.learner.groups_per_step
    what = f"advantage.name = {config.advantage.name} (whitening)"
    for name, strategy in used:
        if strategy.selection == "right":
            raise ConfigError(
                f"{what} compares right with wrong samples of a step, but {name} keeps right ones only; use fixed"
            )
        if batch == 1 and (strategy.group_size or strategy.n_max) == 1:
            raise ConfigError(
                f"{what} needs two samples a step, got learner.groups_per_step = 1 and one sample kept by {name}"
            )
    filters = own.name if own.name in FILTERS else ""
    if own.unresolved not in ("auto", "keep"):
        filters = f"strategy.unresolved = {own.unresolved}"
    if rule.compares_prompts and filters:
        raise ConfigError(
            f"{what} gives every group an advantage, so {filters} would leave none out;"
            " use fixed, or reinforce++_baseline"
        )


def _rule(config: Advantage, names: Sequence[str]) -> AdvantageRule:
    """One rule for all strategies of a run."""
    if config.name == "auto":
        _same("advantage.name", {name: OWN_ADVANTAGE.get(name, "ada") for name in names})
    return advantage_rule(config, names[0])


def _same(key: str, meanings: Mapping[str, Choice]) -> Choice:
    """What `auto` means for every strategy of a run.

    Raises:
        ConfigError: it means different things in different stages.
    """
    first, *others = meanings.values()
    if any(other != first for other in others):
        said = ", ".join(f"{meaning} for {name}" for name, meaning in meanings.items())
        raise ConfigError(f"{key} = auto means {said}, and holds for the whole run: with [[stages]], say which")
    return first


def _futility(config: Config, strategy: Strategy) -> Futility | None:
    own, name = config.futility, config.strategy.futility
    if name == "auto":
        may_give_up = config.strategy.name in ("balance", "positives") and len(config.strategies) == 1
        name = "threshold" if may_give_up and config.staleness.is_bounded else "none"
    if name == "none":
        return None
    if len(config.strategies) > 1:
        raise ConfigError("strategy.futility must be none or auto with [[stages]]: its table belongs to one exit rule")
    if name != "optimal":
        needs_expiry = name == "expired"
        return Threshold(strategy, own.p_success, own.prior_right, own.prior_wrong, needs_expiry)
    try:
        return solve(strategy, load_law(own.prior, "futility.prior")).table
    except ValueError as exc:
        raise ConfigError(f"strategy.{exc}") from exc
