"""GRESO (arXiv 2506.02177; values of the authors' code): skip prompts whose last visits ended without spread in reward.

A prompt whose last z visits in a row were all right is skipped with probability 1 - max(p_easy^z, 0.01); all wrong:
p_hard; a visit with both classes, or a change from all right to all wrong, starts the count again. So a prompt that
was never visited is never skipped (the rule works from the second epoch on) and every other one keeps a chance of at
least 0.01 a turn.

p_easy and p_hard start at 0.5 and are moved by 0.01 within [0.05, 0.95], down when the share of all-right (all-wrong)
visits is at least its target, else up. Targets: 25 % of the visits, a third of it easy, two thirds hard.

Deviations: the authors adjust once an optimizer step, from the groups sampled for it, after the first epoch; here after
every `adjust_every` visits to prompts that had been visited before (those are the visits of later epochs). "Easy" is
all right and "hard" is all wrong; the authors' code tests mean reward >= 0.98 and <= 0.11 (rewards with a 0.1 for
format). `selector.max_passes` = 100 ends longer rows of skips, so the rarest prompt has a visit in 64 turns on average,
not in 100; 0 gives the exact rule. Their adaptive batch size is not needed: prompts are admitted one by one.

Memory: one number a visited prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.rng import SplitMix
from engine.core.selectors.base import Candidate, Draw
from engine.core.selectors.draws import uniform


@dataclass(slots=True)
class Greso:
    """`selector.name = "greso"`."""

    p_easy: float = 0.5
    """Chance of a turn after one all-right visit; its power z after z of them."""
    p_hard: float = 0.5
    """The same after all-wrong visits."""
    p_step: float = 0.01
    p_min: float = 0.05
    p_max: float = 0.95
    floor: float = 0.01
    """Least chance of a turn."""
    target_easy: float = 0.25 / 3
    """Wanted share of all-right visits."""
    target_hard: float = 0.5 / 3
    """Wanted share of all-wrong visits."""
    adjust_every: int = 64
    pool: int = field(default=1, init=False)
    _streaks: dict[str, int] = field(default_factory=dict[str, int])
    """Prompt -> length of its row of visits without spread: above 0 all right, below 0 all wrong, 0 none."""
    _num_repeats: int = 0
    _num_easy: int = 0
    _num_hard: int = 0

    def choose(self, candidates: Sequence[Candidate], draw: Draw) -> int | None:
        """The one candidate, or None: skipped."""
        chance = self.visit_chance(candidates[0].prompt_id)
        return 0 if chance >= 1.0 or uniform(SplitMix(draw.seed)) < chance else None

    def visit_chance(self, prompt_id: str) -> float:
        """Probability that a turn of this prompt becomes a visit: 1 - the skip probability."""
        streak = self._streaks.get(prompt_id, 0)
        base = self.p_easy if streak > 0 else self.p_hard
        return max(base ** abs(streak), self.floor)

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        """Lengthen or end the prompt's row; adjust both chances when enough repeated visits were seen.

        Visits that another selector chose say nothing about what these chances lead to.
        """
        kind = 0 if right and wrong else 1 if right else -1
        before = self._streaks.get(prompt_id)
        self._streaks[prompt_id] = before + kind if before is not None and before * kind > 0 else kind
        if before is None or not is_in_force:
            return
        self._num_repeats += 1
        self._num_easy += kind > 0
        self._num_hard += kind < 0
        if self._num_repeats >= self.adjust_every:
            self.p_easy = self._moved(self.p_easy, self._num_easy, self.target_easy)
            self.p_hard = self._moved(self.p_hard, self._num_hard, self.target_hard)
            self._num_repeats = self._num_easy = self._num_hard = 0

    def _moved(self, chance: float, num_found: int, target: float) -> float:
        if num_found >= target * self._num_repeats:
            return max(chance - self.p_step, self.p_min)
        return min(chance + self.p_step, self.p_max)
