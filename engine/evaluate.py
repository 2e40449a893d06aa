"""The held-out test: Ave@k at temperature 1.0 and greedy accuracy, through the same workers and verifiers.

Consumes: test rows. Waits for: samples, each request with the scheduler's slots. Produces: accuracies, overall and by
level. Requests of a lost worker are asked for again; a sample without a verdict counts as neither right nor wrong.
Arm numbers of evaluation requests are negative, so they never meet those of training.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from configs.inputs import Evaluation
from configs.sampling import Sampling
from engine.core.errors import DeadlineError, PeerLost
from engine.core.rng import derive
from engine.datasets import PromptRow
from engine.encoding import Encoder
from engine.fleet import Fleet
from engine.transport.base import Hub
from engine.verifiers import Grader
from engine.wire import Generate, Int32s, SampleDone, SampleFailed, SampleKey, SamplingParams

PROGRESS_DEADLINE_S = 300.0
"""Longest time without any evaluation sample: a full batch of long answers on a slow machine."""
MAX_RETRIES = 3
_EVAL_STREAM = 0x6576616C
_GREEDY = -1


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Result of one evaluation; shares in [0, 1]."""

    sampled: float
    """Ave@k at temperature 1.0."""
    greedy: float | None
    by_level: dict[str, float]
    """Ave@k of each level."""
    num_prompts: int
    num_unscored: int
    """Samples without a verdict."""


@dataclass(slots=True)
class Evaluator:
    """Runs one evaluation at a time."""

    hub: Hub
    fleet: Fleet
    grader: Grader
    encoder: Encoder
    config: Evaluation
    sampling: Sampling
    tasks: asyncio.TaskGroup
    on_tokens: Callable[[int], None]
    seed: int = 0
    _rows: Sequence[PromptRow] = ()
    _token_ids: list[Int32s] = field(default_factory=list[Int32s])
    _todo: deque[SampleKey] = field(default_factory=deque[SampleKey])
    _open: set[SampleKey] = field(default_factory=set[SampleKey])
    _right: dict[tuple[int, int], bool | None] = field(default_factory=dict[tuple[int, int], "bool | None"])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _encoded_for: int = 0

    async def measure(self, rows: Sequence[PromptRow]) -> Accuracy:
        """Evaluate the first `max_prompts` rows with the workers' current weights.

        Raises:
            DeadlineError: no sample came for PROGRESS_DEADLINE_S.
        """
        self._rows = rows[: self.config.max_prompts]
        if self._encoded_for != id(rows):
            self._token_ids = await self.encoder.encode([row.text for row in self._rows])
            self._encoded_for = id(rows)
        self._right.clear()
        tries = [*range(self.config.samples), *([_GREEDY] if self.config.greedy else [])]
        self._todo.extend(SampleKey(-1 - row, k) for k in tries for row in range(len(self._rows)))
        while self._todo or self._open:
            await self._fill()
            self._changed.clear()
            try:
                # Unblocked by on_sample(), on_failed(), on_lost(), wake().
                async with asyncio.timeout(PROGRESS_DEADLINE_S):
                    await self._changed.wait()
            except TimeoutError as exc:
                raise DeadlineError(f"evaluation: no sample for {PROGRESS_DEADLINE_S:g} s") from exc
        return self._accuracy()

    def wake(self) -> None:
        """A worker became live."""
        self._changed.set()

    def on_sample(self, message: SampleDone) -> None:
        """A worker answered."""
        self.fleet.release(message.key)
        self.on_tokens(len(message.token_ids))
        if message.key in self._open:
            self.tasks.create_task(self._grade(message))
        self._changed.set()

    def on_failed(self, message: SampleFailed) -> None:
        """A worker could not answer."""
        self.fleet.release(message.key)
        self._again(message.key)

    def on_lost(self, keys: Sequence[SampleKey]) -> None:
        """Requests of a lost worker."""
        for key in keys:
            self._again(key)

    async def _fill(self) -> None:
        while self._todo and self.fleet.num_free > 0:
            key = self._todo.popleft()
            worker = self.fleet.assign(key)
            if worker is None:
                self._todo.appendleft(key)
                return
            self._open.add(key)
            temperature = 0.0 if key.index == _GREEDY else 1.0
            seed = derive(self.seed, _EVAL_STREAM, -key.arm, key.index + 1)
            params = SamplingParams(self.sampling.max_tokens, temperature, 1.0, seed)
            message = Generate(key=key, prompt_token_ids=self._token_ids[-1 - key.arm], params=params)
            try:
                await self.hub.send(worker, message)
            except PeerLost:
                continue

    def _again(self, key: SampleKey) -> None:
        if key in self._open:
            self._open.discard(key)
            if key.retry < MAX_RETRIES:
                self._todo.append(SampleKey(key.arm, key.index, key.retry + 1))
            else:
                self._right[key.arm, key.index] = None
        self._changed.set()

    async def _grade(self, message: SampleDone) -> None:
        key = message.key
        verdict = await self.grader.grade(message.text, self._rows[-1 - key.arm].answer)
        self._right[key.arm, key.index] = None if verdict in ("timeout", "crashed") else verdict == "correct"
        self._open.discard(key)
        self._changed.set()

    def _accuracy(self) -> Accuracy:
        by_level: defaultdict[str, list[bool]] = defaultdict(list)
        greedy: list[bool] = []
        for (arm, index), right in self._right.items():
            if right is None:
                continue
            if index == _GREEDY:
                greedy.append(right)
            else:
                by_level[self._rows[-1 - arm].level].append(right)
        sampled = [right for level in by_level.values() for right in level]
        return Accuracy(
            sampled=_share(sampled),
            greedy=_share(greedy) if self.config.greedy else None,
            by_level={level: _share(by_level[level]) for level in sorted(by_level)},
            num_prompts=len(self._rows),
            num_unscored=sum(right is None for right in self._right.values()),
        )


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right) if right else 0.0
