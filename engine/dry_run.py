"""`--dry-run`: the resolved plan in words and numbers, before anything is loaded or paid for."""

from configs.load import dump_config
from configs.root import Config
from engine.core.futility import Threshold
from engine.core.policy import Policy
from engine.core.strategy import Counts
from engine.cores import CorePlan
from engine.policy import make_policy


def describe_plan(config: Config, cores: CorePlan) -> str:
    """Slots, arms, B, η, what follows from them, and the whole resolved configuration."""
    policy = make_policy(config)
    strategy = policy.strategy
    greedy = " and its greedy response" if policy.rule.needs_greedy else ""
    need = strategy.need(Counts(0, 0, 0, 0, budget=strategy.n_max))
    width = config.strategy.width or need
    slots = config.worker.count * config.worker.slots
    groups = config.learner.groups_per_step
    kept = strategy.group_size or strategy.n_max
    lines = [
        f"strategy     {config.strategy.name}: at most {strategy.n_max} samples a visit, {kept} kept"
        f"{_stages_in_words(config)}",
        f"width        {width} requests a new arm{greedy} ({'fixed' if config.strategy.width else 'by need'})",
        f"slots        {config.worker.count} worker(s) x {config.worker.slots} = {slots} requests at once",
        f"arms         {max(1, slots // width)} to {slots} open at once (a nearly finished arm needs one slot)",
        f"B            {groups} groups a step, at most {groups * kept} samples",
        f"η            {config.staleness.max}: {_bound_in_words(config)}",
        f"waiting      launching pauses above {policy.bound.max_waiting} groups that wait for the learner",
        f"giving up    {_futility_in_words(config, policy)}",
        f"budget       {strategy.n_max * slots // max(1, width)} samples at most for the arms that are open at once",
        f"length       {_length_in_words(config)}",
        f"{cores.describe()}",
        "",
        "# resolved configuration",
        dump_config(config),
    ]
    return "\n".join(lines)


def _futility_in_words(config: Config, policy: Policy) -> str:
    match policy.futility:
        case None:
            return "never: every arm gets its whole budget"
        case Threshold(needs_expiry=needs_expiry):
            which = "arms that lost samples to expiry and" if needs_expiry else "arms"
            return (
                f"{which} whose exit has a chance under {config.futility.p_success:g} (strategy.futility = none: never)"
            )
        case _:
            return "where no way of going on is worth its samples (strategy.futility = optimal)"


def _stages_in_words(config: Config) -> str:
    """What changes later in a schedule; the numbers below it are those of its first part."""
    words = ""
    for stage in config.schedule:
        if not stage.from_step:
            continue
        own, selector = stage.strategy, stage.selector
        changes = [f"{own.name}, at most {own.n_max} samples"] if own else []
        changes += [f"selector {selector.name}"] if selector else []
        words += f"; from step {stage.from_step}: {', '.join(changes)}"
    return words


def _bound_in_words(config: Config) -> str:
    if config.staleness.max == 0:
        return "strictly on-policy; generation waits for every weight update"
    groups = config.staleness.max * config.learner.groups_per_step
    return f"no token older than {config.staleness.max} version(s) at the gradient; {groups} groups may be ahead"


def _length_in_words(config: Config) -> str:
    steps = f"{config.run.max_steps} steps" if config.run.max_steps else ""
    seconds = f"{config.run.max_train_s:g} s" if config.run.max_train_s else ""
    return " or ".join(part for part in (steps, seconds) if part) + " of training"
