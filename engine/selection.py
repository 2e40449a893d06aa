"""From a configuration to the selection of prompts (engine.core knows no configuration)."""

from configs.root import Config
from configs.selection import Selector as SelectorConfig
from engine.core.selectors import Curriculum, Greso, Mopps, Selection, Selector, Stage, Uniform


def make_selection(config: Config) -> Selection:
    """What `config.selector`, and the stages after it, say about the next prompt."""
    made: dict[SelectorConfig, Selector] = {}

    def make(own: SelectorConfig) -> Selector:
        # A stage that comes back to a selector goes on with what it has learnt.
        return made.setdefault(own, _selector(own))

    own = config.selector
    first = make(own)
    stages = tuple(
        Stage(stage.from_step, make(stage.selector), stage.selector.max_passes)
        for stage in config.schedule
        if stage.selector is not None
    )
    return Selection(first, own.max_passes, config.run.seed, stages)


def _selector(own: SelectorConfig) -> Selector:
    match own.name:
        case "uniform":
            return Uniform()
        case "mopps":
            band = (own.mopps.low, own.mopps.high) if own.mopps.rule == "band" else None
            return Mopps(own.pool, own.mopps.target, band, own.prior_right, own.prior_wrong)
        case "greso":
            greso = own.greso
            return Greso(
                p_easy=greso.p_easy,
                p_hard=greso.p_hard,
                p_step=greso.p_step,
                p_min=greso.p_min,
                p_max=greso.p_max,
                floor=greso.floor,
                target_easy=greso.target * greso.easy_share,
                target_hard=greso.target * (1.0 - greso.easy_share),
                adjust_every=greso.adjust_every,
            )
        case "curriculum":
            course = own.curriculum
            return Curriculum(own.pool, course.first, course.last, course.steps, own.prior_right, own.prior_wrong)
