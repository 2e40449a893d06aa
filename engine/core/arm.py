"""An arm: one visit of a prompt while it is being sampled, with its launches, its scored prefix and its counts.

Invariants:
- Launch indices are 0, 1, 2, ... without gaps. A failed launch is asked for again under its own index, so a sample
  counts at its launch position whatever happened on the way.
- `counted` is the longest scored prefix in launch order (under completion accounting: the samples in order of
  arrival). A sample counts once.
- Where a greedy response is wanted (`first_index` 1) it is launch 0: nothing counts before it is scored, and it is no
  sample: neither counted nor kept, only its reward is read.
- An arm does not know about workers, clocks or messages.
- Counts and need are remembered until a sample counts or expires: the dispatcher asks several times for each sample.
- An arm that drains asks for nothing new, but counts everything that it launched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.core.past import EMPTY, Past
from engine.core.strategy import Counts, Strategy

Reason = Literal["solved", "exhausted", "futile", "expired", "failed"]
Accounting = Literal["launch", "completion"]
Ending = Literal["solved", "exhausted", "futile", "hopeless"]
"""A verdict that ends a visit; `hopeless` is the futility rule's, the others are a strategy's."""
UNLIMITED = 1 << 62
"""Tokens that no visit reaches."""
_NEVER = 1 << 62
"""Newer than any policy version."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked. `token_ids` is opaque to the core."""

    prompt_id: str
    answer: str
    level: str
    token_ids: object
    num_tokens: int
    turn: int = 0
    """Of this visit, in the visit order (engine/core/prompts.py)."""


@dataclass(slots=True)
class Sample:
    """One scored response."""

    index: int
    """Launch index in its arm."""
    reward: float
    is_right: bool
    min_version: int
    """Version of its oldest token."""
    num_tokens: int
    """Response tokens."""
    response: object
    """What the worker sent; opaque to the core."""


@dataclass(slots=True)
class Arm:
    """State of one visit."""

    arm_id: int
    prompt: Prompt
    seed: int
    strategy: Strategy
    """The one it was opened with."""
    budget: int
    """Samples that may count."""
    accounting: Accounting = "launch"
    past: Past = EMPTY
    """Of its prompt, when the arm was opened."""
    first_index: int = 0
    """Launch index of the first sample; 1 = launch 0 is a greedy response."""
    greedy: Sample | None = None
    """The greedy response, once scored."""
    token_budget: int = UNLIMITED
    """Response tokens at which nothing more counts."""
    num_requeues: int = 0
    """Times its budget was used up and given again."""
    is_parked: bool = False
    """Waits to go on later; what is in flight is still scored and counts."""
    num_launched: int = 0
    retired: Reason | None = None
    counted: list[Sample] = field(default_factory=list[Sample])
    num_tokens: int = 0
    """Response tokens of the counted samples and of the greedy response."""
    ending: Ending | None = None
    """The verdict at its stopping sample, while it drains."""
    stop: tuple[int, int] | None = None
    """Right samples and all of them, counted when it first began to drain."""
    in_flight: dict[int, int] = field(default_factory=dict[int, int])
    """Launch index -> try that is under way (generating or being scored)."""
    versions: set[int] = field(default_factory=set[int])
    """Versions of the oldest tokens of its counted samples."""
    width: int = -1
    """As last worked out (engine/core/width.py); -1 = the counts changed since."""
    width_at: int = 0
    """Cutoff of that."""
    width_for: object = None
    """Pace of that."""
    _waiting: dict[int, Sample] = field(default_factory=dict[int, Sample])
    _again: list[int] = field(default_factory=list[int])
    _failures: dict[int, int] = field(default_factory=dict[int, int])
    _cutoff: int = -1
    _oldest_right: int = _NEVER
    """Version of the oldest fresh right sample that counts."""
    _oldest_wrong: int = _NEVER
    _fresh_right: int = 0
    _fresh_wrong: int = 0
    _right: int = 0
    _counts: Counts | None = None
    """At `_cutoff`; None = to be made."""

    def launch(self) -> tuple[int, int]:
        """Index and try of the next request; failed launches come first."""
        if self._again:
            index = self._again.pop(0)
            retry = self._failures[index]
        else:
            index, retry = self.num_launched, 0
            self.num_launched += 1
        self.in_flight[index] = retry
        return index, retry

    @property
    def num_right(self) -> int:
        """Right samples counted."""
        return self._right

    @property
    def num_pending(self) -> int:
        """Launched samples that do not count yet: in flight, being scored, or scored behind an open launch."""
        num_launched = len(self.in_flight) + len(self._waiting)
        return num_launched - 1 if self.first_index and 0 in self.in_flight else num_launched

    @property
    def has_open_launches(self) -> bool:
        """Whether a launched sample does not count yet, those to be asked for again included."""
        return bool(self.in_flight or self._waiting or self._again)

    @property
    def num_failed_launches(self) -> int:
        """Launches waiting to be asked again."""
        return len(self._again)

    def score(self, sample: Sample) -> None:
        """Take in a scored sample of an open launch, or the scored greedy response."""
        del self.in_flight[sample.index]
        if sample.index < self.first_index:
            self.greedy = sample
            self.num_tokens += sample.num_tokens
        else:
            self._waiting[sample.index] = sample

    def fail(self, index: int) -> int:
        """An open launch failed and will be asked again; returns how often it has failed."""
        del self.in_flight[index]
        self._failures[index] = self._failures.get(index, 0) + 1
        self._again.append(index)
        self._again.sort()
        return self._failures[index]

    def take_next(self) -> Sample | None:
        """Count the next sample, if there is one; exit rules are tested between two calls."""
        waiting, first_index = self._waiting, self.first_index
        if not waiting or (first_index and self.greedy is None):
            return None
        index = next(iter(waiting)) if self.accounting == "completion" else len(self.counted) + first_index
        sample = waiting.pop(index, None)
        if sample is not None:
            self._count(sample)
        return sample

    def counts(self, oldest_fresh: int) -> Counts:
        """Counts by class, fresh meaning min_version >= `oldest_fresh`."""
        if oldest_fresh != self._cutoff:
            self._expire(oldest_fresh)
        counts = self._counts
        if counts is None:
            wrong = len(self.counted) - self._right
            counts = Counts(self._fresh_right, self._fresh_wrong, self._right, wrong, self.budget, self.seed)
            self._counts = counts
        return counts

    def oldest_fresh_version(self, *, right: bool) -> int:
        """Smallest version among a class's samples that were fresh when `counts` was last asked; there must be one."""
        return self._oldest_right if right else self._oldest_wrong

    def give_budget_again(self) -> None:
        """Let as many more samples and tokens count as when it was opened."""
        self.budget += self.budget // (self.num_requeues + 1)
        if self.token_budget < UNLIMITED:
            self.token_budget += self.token_budget // (self.num_requeues + 1)
        self.num_requeues += 1
        self._counts, self.width = None, -1

    def drain(self, ending: Ending) -> None:
        """Ask for nothing new from here on; what was launched still counts."""
        self.ending = ending
        if self.stop is None:
            self.stop = self._right, len(self.counted)

    def uncounted(self) -> Iterator[Sample]:
        """Scored samples behind the stopping sample: they never count."""
        return iter(self._waiting.values())

    def _count(self, sample: Sample) -> None:
        self.counted.append(sample)
        self.num_tokens += sample.num_tokens
        version = sample.min_version
        if version >= self._cutoff:
            if sample.is_right:
                self._fresh_right += 1
                if version < self._oldest_right:
                    self._oldest_right = version
            else:
                self._fresh_wrong += 1
                if version < self._oldest_wrong:
                    self._oldest_wrong = version
        self._right += sample.is_right
        self._counts, self.width = None, -1

    def _expire(self, oldest_fresh: int) -> None:
        """Move the cutoff."""
        is_same = self._cutoff < oldest_fresh <= min(self._oldest_right, self._oldest_wrong)
        self._cutoff = oldest_fresh
        if is_same:
            return
        right = [s.min_version for s in self.counted if s.is_right and s.min_version >= oldest_fresh]
        wrong = [s.min_version for s in self.counted if not s.is_right and s.min_version >= oldest_fresh]
        self._oldest_right, self._oldest_wrong = min(right, default=_NEVER), min(wrong, default=_NEVER)
        self._fresh_right, self._fresh_wrong = len(right), len(wrong)
        self._counts = None
