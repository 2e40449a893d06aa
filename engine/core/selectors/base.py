"""The seam of a selector: candidates in, the one to visit out. Orthogonal to strategies; pure.

The prompts of each epoch come in seeded order (engine/core/prompts.py). A draw takes the next `pool` of them; one is
visited, the others are passed over: their turn of this epoch is over. (If they stayed, every prompt would still be
visited once an epoch, and a selector could only change the order.)

Invariants:
- Every candidate of a draw is either visited or passed over, so visits + `num_passed_over` = candidates offered.
- No prompt is left out for ever: with `max_passes` = m > 0, none is passed over in more than m draws in a row by a pool
  of 1, nor in more than m + N - 1 by a larger pool over N prompts. Proof: once passed over m times, a prompt loses a
  draw only to one that has waited at least as long; that one waits from then on, so behind it. So it loses to each
  other prompt once at most. This holds whatever the selector says.
- Choices depend on the seed, the number of the draw, the candidates and the policy version only.
- Another selector may take force at a policy version (`stages`). Every selector sees every visit from the start, so one
  that takes force later knows the prompts; the waits of passed-over prompts go on, under the bound in force.
- Memory: two numbers a prompt that was passed over since its last visit, and what a selector keeps of visited prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.past import Past
from engine.core.rng import derive

_STREAM = 0x73656C656374
"""Separates the seeds of draws from all others."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that may be visited next."""

    prompt_id: str
    past: Past
    """At the policy version of the draw."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a choice may depend on besides the candidates."""

    seed: int
    """Another one for each draw."""
    version: int
    """Policy versions since the selector took force: the version itself without stages."""


class Selector(Protocol):
    """Which prompt is worth a visit."""

    @property
    def pool(self) -> int:
        """Candidates of one draw; 0 = all prompts are visited in their order and nothing is asked."""
        ...

    def choose(self, candidates: Sequence[Candidate], draw: Draw) -> int | None:
        """Index of the candidate to visit; None = none of them. At least one candidate, at most `pool`."""
        ...

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        """A visit ended with these counted samples; at least one. Not in force: another selector chose it."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """A selector that takes force later."""

    from_version: int
    selector: Selector
    max_passes: int = 0


@dataclass(slots=True)
class Selection:
    """Draws by a selector, and lets no prompt wait for ever.

    Example: `Selection(Mopps(pool=16), max_passes=100, seed=1).draw(candidates, version=0)` is an index into
    `candidates`.
    """

    selector: Selector
    max_passes: int = 0
    """A prompt that so many draws in a row passed over is visited next; 0 = only by the selector's own chance."""
    seed: int = 0
    stages: tuple[Stage, ...] = ()
    """Later selectors by rising version."""
    num_draws: int = 0
    num_passed_over: int = 0
    """Candidates that were not visited."""
    _waits: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """prompt -> (first draw that passed it over since its last visit, how many did)."""

    @property
    def max_pool(self) -> int:
        """Candidates of one draw, at most, over all stages; 0 = nothing is ever drawn."""
        return max(self.selector.pool, *(stage.selector.pool for stage in self.stages), 0)

    def pool(self, version: int) -> int:
        """Candidates of one draw at a policy version; 0 = nothing is drawn."""
        return self._at(version).selector.pool if self.stages else self.selector.pool

    def visit(self, prompt_id: str) -> None:
        """A prompt is visited in its turn, where nothing is drawn."""
        self._waits.pop(prompt_id, None)

    def draw(self, candidates: Sequence[Candidate], version: int) -> int | None:
        """Index of the candidate to visit, or None; the turns of the others are over.

        Args:
            candidates: At least one, at most `pool`.
            version: Policy version that the visit would start from.
        """
        stage = self._at(version)
        chosen = self._overdue(candidates, stage.max_passes)
        if chosen is None:
            seed = derive(self.seed, _STREAM, self.num_draws)
            chosen = stage.selector.choose(candidates, Draw(seed, version - stage.from_version))
        self.num_passed_over += len(candidates) - (chosen is not None)
        if self._is_bounded:
            self._count(candidates, chosen)
        self.num_draws += 1
        return chosen

    def observe(self, prompt_id: str, right: int, wrong: int, version: int) -> None:
        """A visit ended at a policy version; one without counted samples says nothing."""
        if not right + wrong:
            return
        if not self.stages:
            self.selector.observe(prompt_id, right, wrong)
            return
        in_force = self._at(version).selector
        for selector in self._selectors:
            selector.observe(prompt_id, right, wrong, is_in_force=selector is in_force)

    @property
    def _selectors(self) -> list[Selector]:
        """Each one once: stages may share one."""
        found = [self.selector]
        found += [stage.selector for stage in self.stages]
        return list({id(selector): selector for selector in found}.values())

    @property
    def _is_bounded(self) -> bool:
        """Whether some stage bounds how often a prompt is passed over."""
        return self.max_passes > 0 or any(stage.max_passes for stage in self.stages)

    def _at(self, version: int) -> Stage:
        """What is in force at a policy version."""
        found = Stage(0, self.selector, self.max_passes)
        for stage in self.stages:
            if version >= stage.from_version:
                found = stage
        return found

    def _overdue(self, candidates: Sequence[Candidate], max_passes: int) -> int | None:
        """The candidate that must not be passed over again; of several, the one that has waited longest."""
        if not max_passes:
            return None
        longest, found = self.num_draws, None
        for index, candidate in enumerate(candidates):
            since, passes = self._waits.get(candidate.prompt_id, (longest, 0))
            if since < longest and passes >= max_passes:
                longest, found = since, index
        return found

    def _count(self, candidates: Sequence[Candidate], chosen: int | None) -> None:
        visited = None if chosen is None else candidates[chosen].prompt_id
        # Near the end of an epoch, or with few prompts, one may be there twice: one draw passes it over once.
        for prompt_id in dict.fromkeys(candidate.prompt_id for candidate in candidates):
            if prompt_id == visited:
                self._waits.pop(prompt_id, None)
            else:
                since, passes = self._waits.get(prompt_id, (self.num_draws, 0))
                self._waits[prompt_id] = (since, passes + 1)
