"""Which keys are read only beside certain values of others: a setting that nothing would read is refused.

Invariant: a default is accepted everywhere, so a dumped configuration loads again.

What belongs to one choice of several ([giveup], [allocation], [selector.mopps], [simulated], strategy.k_pos) may stay
where another is chosen: strategies, selectors and kinds change from run to run of one file. So may [futility] beside
`none`, which is said on purpose. Called at load, by the whole configuration.
"""

import json
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

from configs.base import Section


class Where(NamedTuple):
    """What another key must be."""

    key: str
    values: tuple[object, ...] = ()
    """One of these; none: any number above 0."""
    in_force: str = ""
    """Property that says what `auto` means for it."""
    why: str = ""
    """Said instead of what it should be."""


RATIOS = Where("loss.objective", ("ppo", "cispo", "gspo", "decoupled"))
TRAINS = Where("learner.kind", ("torch",))
SHARDS = Where("learner.backend", ("deepspeed",))
TIS = Where("loss.mismatch.rule", ("tis",), in_force="loss.mismatch_rule")
ICEPOP = Where("loss.mismatch.rule", ("icepop",), in_force="loss.mismatch_rule")
PENALTY = Where("loss.kl.weight")
ADAPTERS = Where("lora.rank")
OWN_RULE = Where("advantage.name", ("custom",))
THRESHOLD = Where("strategy.futility", ("auto", "none", "threshold", "expired"))
POOLED = Where("selector.name", ("mopps", "curriculum"))
BAND = Where("selector.mopps.rule", ("band",))

MEANING: dict[str, tuple[Where, ...]] = {
    "sampling.top_p": (
        Where(
            "learner.kind",
            ("simulated",),
            why="samples would come with logprobs of the cut distribution, and the learner's are of the whole",
        ),
    ),
    "reward.overlong_factor": (Where("reward.overlong_tokens"),),
    "loss.clip_low": (RATIOS,),
    "loss.clip_high": (RATIOS,),
    "loss.dual_clip": (Where("loss.objective", ("ppo", "gspo", "decoupled")),),
    "loss.proximal": (Where("loss.objective", ("decoupled",)),),
    "loss.m2_budget": (Where("loss.objective", ("ppo", "cispo", "reinforce", "decoupled", "likelihood")),),
    "loss.constant_tokens": (Where("loss.aggregation", ("constant",)),),
    "loss.mismatch.level": (TIS,),
    "loss.mismatch.cap": (TIS,),
    "loss.mismatch.low": (ICEPOP,),
    "loss.mismatch.high": (ICEPOP,),
    "loss.kl.weight": (TRAINS,),
    "loss.kl.estimator": (PENALTY,),
    "loss.kl.reference": (PENALTY,),
    "lora.rank": (TRAINS, Where("learner.backend", ("torch",))),
    "lora.alpha": (ADAPTERS,),
    "lora.target_modules": (ADAPTERS,),
    "learner.backend": (TRAINS,),
    "learner.device": (TRAINS,),
    "learner.compile": (TRAINS, Where("learner.backend", ("torch",))),
    "learner.zero_stage": (SHARDS,),
    "learner.rank_deadline_s": (SHARDS,),
    "advantage.baseline": (OWN_RULE,),
    "advantage.divide_by_std": (OWN_RULE,),
    "advantage.weight": (OWN_RULE,),
    "advantage.max_weight": (OWN_RULE, Where("advantage.weight", ("inverse_sqrt", "inverse"))),
    "advantage.epsilon": (OWN_RULE, Where("advantage.weight", ("inverse_sqrt", "inverse"))),
    "advantage.centring": (OWN_RULE,),
    "advantage.whiten": (OWN_RULE,),
    "futility.p_success": (THRESHOLD,),
    "futility.prior_right": (THRESHOLD,),
    "futility.prior_wrong": (THRESHOLD,),
    "futility.prior": (Where("strategy.futility", ("auto", "none", "optimal")),),
    "selector.pool": (POOLED,),
    "selector.prior_right": (POOLED,),
    "selector.prior_wrong": (POOLED,),
    "selector.mopps.target": (Where("selector.mopps.rule", ("nearest",)),),
    "selector.mopps.low": (BAND,),
    "selector.mopps.high": (BAND,),
    "cores.generation": (Where("cores.pin", (True,)),),
    "cores.learning": (Where("cores.pin", (True,)),),
}
"""{key: what others must be for it to be read}, all of them."""


def meaningless(root: Section, first: Literal["", "selector"] = "") -> Iterator[str]:
    """A line for each key that is not at its default and that nothing would read.

    Args:
        root: The configuration, or a stage of it.
        first: Look at the keys of this section only.
    """
    for key, needed in MEANING.items():
        if not key.startswith(first):
            continue
        value, default = _at(root, key), _default(root, key)
        if value == default:
            continue
        for where in needed:
            if not _holds(root, where):
                yield f"{key} must be {shown(default)} with {_what_is(root, where)}, got {shown(value)}: {_why(where)}"
                break


def shown(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return json.dumps(value, default=str, ensure_ascii=False)


def _at(root: Section, key: str) -> object:
    place: object = root
    for name in key.split("."):
        place = cast("object", getattr(place, name))
    return place


def _default(root: Section, key: str) -> object:
    section, _, name = key.rpartition(".")
    field = type(cast("Section", _at(root, section))).model_fields[name]
    return cast("object", field.get_default(call_default_factory=True))


def _holds(root: Section, where: Where) -> bool:
    value = _at(root, where.in_force or where.key)
    return value in where.values if where.values else bool(value)


def _what_is(root: Section, where: Where) -> str:
    written, value = _at(root, where.key), _at(root, where.in_force or where.key)
    text = f"{where.key} = {_bare(written)}"
    return text if written == value else f"{text} (here {_bare(value)})"


def _why(where: Where) -> str:
    if where.why:
        return where.why
    if not where.values:
        return f"it has a meaning only with {where.key} above 0"
    *others, last = map(_bare, where.values)
    allowed = f"{', '.join(others)} or {last}" if others else last
    return f"it has a meaning only with {where.key} = {allowed}"


def _bare(value: object) -> str:
    return value if isinstance(value, str) else shown(value)
