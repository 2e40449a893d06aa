"""Pure prompt selectors, one file each; the seam is base.py, engine/selection.py makes the one a config names."""

from engine.core.selectors.base import Candidate, Draw, Selection, Selector, Stage
from engine.core.selectors.curriculum import Curriculum
from engine.core.selectors.greso import Greso
from engine.core.selectors.mopps import Mopps
from engine.core.selectors.uniform import Uniform

__all__ = ["Candidate", "Curriculum", "Draw", "Greso", "Mopps", "Selection", "Selector", "Stage", "Uniform"]
