"""The continuous queue of prompts: turns in seeded order, encoded ahead of need, visited as the selector says.

Consumes: the visit order (core.prompts) and the data rows. Waits for: its buffer to fall below the low mark.
Produces: encoded prompts, and a call of `changed` whenever some were added or the order ended.
Ends when every epoch is over. The buffer holds `CHUNK_ROWS` draws and a chunk at most; token ids of up to `CACHED_ROWS`
rows are kept for later epochs. A prompt that does not fit the context is skipped and counted, once per row.

Each epoch gives each prompt one turn. A turn is a visit, or the selector passes it over (counted); both use it up, so
`max_epochs` bounds visits whatever the selector. A prompt that came back (`put_back`) is visited once more in its
epoch, under the same turn.

After a resume (`begin_at`) the turns that were not settled come first, then the order goes on where it stood.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from engine.core.arm import Prompt
from engine.core.errors import DataError
from engine.core.past import EMPTY, Past
from engine.core.prompts import Turn, turns_again, turns_from
from engine.core.selectors import Candidate, Selection, Uniform
from engine.datasets import PromptRow
from engine.encoding import Encoder
from engine.wire import Position

CHUNK_ROWS = 256
"""Prompts of one encoding request: some milliseconds of a worker's time."""
CACHED_ROWS = 200_000
"""Encoded rows kept: 80 MB at 100 tokens a prompt."""


@dataclass(slots=True)
class PromptFeed:
    """Hands out prompts, forever or for `max_epochs`."""

    rows: Sequence[PromptRow]
    encoder: Encoder
    seed: int
    max_epochs: int
    max_prompt_tokens: int
    changed: Callable[[], None]
    on_skipped: Callable[[PromptRow], None]
    selection: Selection = field(default_factory=lambda: Selection(Uniform()))
    past_of: Callable[[str], Past] = lambda _prompt_id: EMPTY
    """What is known of a prompt now; asked for candidates only."""
    version: Callable[[], int] = lambda: 0
    """Policy version that decides which selector is in force, and what it aims at."""
    on_passed_over: Callable[[int], None] = lambda _turns: None
    """So many turns ended without a visit."""
    epoch: int = 0
    num_skipped: int = 0
    has_ended: bool = False
    quarantined: set[str] = field(default_factory=set[str])
    _again: deque[int] = field(default_factory=deque[int])
    """Turns of before a resume that are still to be encoded."""
    _done: set[int] = field(default_factory=set[int])
    """Turns from `_next_turn` on that were settled before a resume."""
    _next_turn: int = 0
    """Every turn below was handed out or passed over, but for those in `_again` and the buffer."""
    _order: str = ""
    _low_mark: int = field(init=False)
    """A chunk of draws by the largest pool of all stages: a burst of visits must not wait for every second one to be
    encoded."""
    _put_back: set[str] = field(default_factory=set[str])
    """Prompts that came back in this epoch: each does once."""
    _buffer: deque[Prompt] = field(default_factory=deque[Prompt])
    _low: asyncio.Event = field(default_factory=asyncio.Event)
    _cache: dict[int, Prompt | None] = field(default_factory=dict[int, "Prompt | None"])

    def __post_init__(self) -> None:
        """Size the buffer by the selectors."""
        self._low_mark = CHUNK_ROWS * max(1, self.selection.max_pool)

    @property
    def order(self) -> str:
        """Hash of what the visit order depends on."""
        if not self._order:
            digest = hashlib.sha256(f"{self.seed}".encode())
            for row in self.rows:
                digest.update(b"\0" + row.prompt_id.encode())
            self._order = digest.hexdigest()[:16]
        return self._order

    def begin_at(self, position: Position) -> bool:
        """Go on where an earlier run stood, before `run`; False = it had another order, and this one starts anew."""
        if not position.order:
            return True  # nothing was settled
        if position.order != self.order:
            return False
        self._next_turn = position.next_turn
        self._again.extend(sorted(position.open_turns))
        self._done.update(position.done_turns)
        return True

    def position(self, open_turns: Iterable[int], num_arms: int) -> Position:
        """Where the order stands when the visits of `open_turns` are not settled."""
        waiting = (prompt.turn for prompt in self._buffer)
        unsettled = {turn for turn in chain(open_turns, waiting, self._again) if turn < self._next_turn}
        done = sorted(turn for turn in self._done if turn >= self._next_turn)
        return Position(self._next_turn, sorted(unsettled), done, num_arms, self.order)

    def take(self) -> Prompt | None:
        """The next prompt, or None when none is encoded yet or the order has ended."""
        if len(self._buffer) <= self._low_mark:
            self._low.set()
        if pool := self.selection.pool(self.version()):
            return self._draw(pool)
        if not self._buffer:
            return None
        prompt = self._next()
        self.selection.visit(prompt.prompt_id)
        return prompt

    def put_back(self, prompt: Prompt) -> None:
        """Give this prompt another turn after what is buffered, once an epoch."""
        if prompt.prompt_id not in self._put_back:
            self._put_back.add(prompt.prompt_id)
            self._buffer.append(prompt)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left for ever."""
        return self.has_ended and not self._buffer

    def stop(self) -> None:
        """Training is over: `run` returns."""
        self.has_ended = True
        self._low.set()

    async def run(self) -> None:
        """Fill the buffer until the order ends."""
        order = self._turns()
        num_visits = 0
        while not self.has_ended and (visits := list(islice(order, CHUNK_ROWS))):
            await self._encode([turn.row for turn in visits])
            for turn in visits:
                if turn.epoch != self.epoch:
                    self.epoch = turn.epoch
                    self._put_back.clear()
                if self._again:
                    self._again.popleft()
                prompt = self._cache[turn.row]
                if prompt is not None and prompt.prompt_id not in self.quarantined:
                    self._buffer.append(replace(prompt, turn=turn.number))
            self._trim()
            num_visits += len(visits)
            if num_visits >= len(self.rows) and self.num_skipped == len(self.rows):
                raise DataError(
                    f"none of the {len(self.rows)} training prompts fits into {self.max_prompt_tokens} tokens"
                    " (model.max_context_tokens - sampling.max_tokens)"
                )
            self.changed()
            self._low.clear()
            if len(self._buffer) > self._low_mark:
                # Unblocked by take(); a run that takes no prompt waits for the learner, which has its own deadline.
                await self._low.wait()
        self.has_ended = True
        self.changed()

    def _turns(self) -> Iterator[Turn]:
        """Those that an earlier run left open, then the order from where it stood."""
        size, first = len(self.rows), self._next_turn
        yield from turns_again(list(self._again), size, self.seed)
        for turn in turns_from(first, size, self.seed, self.max_epochs):
            if turn.number not in self._done:
                yield turn

    def _next(self) -> Prompt:
        prompt = self._buffer.popleft()
        self._next_turn = max(self._next_turn, prompt.turn + 1)
        return prompt

    def _draw(self, size: int) -> Prompt | None:
        """Draw until a prompt is to be visited; None when too few candidates are encoded yet, or the order has ended.

        A draw sees a whole pool, except at the end of the order.
        """
        selection, buffer = self.selection, self._buffer
        passed_before = selection.num_passed_over
        taken: Prompt | None = None
        while taken is None and buffer and (self.has_ended or len(buffer) >= size):
            pool = [self._next() for _ in range(min(size, len(buffer)))]
            candidates = [Candidate(prompt.prompt_id, self.past_of(prompt.prompt_id)) for prompt in pool]
            chosen = selection.draw(candidates, self.version())
            taken = None if chosen is None else pool[chosen]
        num_passed_over = selection.num_passed_over - passed_before
        if num_passed_over:
            if len(buffer) <= self._low_mark:
                self._low.set()
            self.on_passed_over(num_passed_over)
            if taken is None and self.is_empty:
                # The last turns were passed over: no visit is left whose end would tell anybody.
                self.changed()
        return taken

    async def _encode(self, rows: Sequence[int]) -> None:
        new = [row for row in dict.fromkeys(rows) if row not in self._cache]
        if not new:
            return
        encoded = await self.encoder.encode([self.rows[row].text for row in new])
        for row, token_ids in zip(new, encoded, strict=True):
            data = self.rows[row]
            is_short = len(token_ids) <= self.max_prompt_tokens
            if not is_short:
                self.num_skipped += 1
                self.on_skipped(data)
            self._cache[row] = (
                Prompt(data.prompt_id, data.answer, data.level, token_ids, len(token_ids)) if is_short else None
            )

    def _trim(self) -> None:
        surplus: Iterator[int] = islice(list(self._cache), max(0, len(self._cache) - CACHED_ROWS))
        for row in surplus:
            del self._cache[row]
