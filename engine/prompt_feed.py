"""The continuous queue of prompts: visits in seeded order, encoded ahead of need.

Consumes: the visit order (core.prompts) and the data rows. Waits for: its buffer to fall below the low mark.
Produces: encoded prompts, and a call of `changed` whenever some were added or the order ended.
Ends when every epoch is over. The buffer holds two chunks at most; token ids of up to `CACHED_ROWS` rows are kept for
later epochs. A prompt that does not fit the context is skipped and counted, once per row.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.core.arm import Prompt
from engine.core.errors import DataError
from engine.core.prompts import visit_order
from engine.datasets import PromptRow
from engine.encoding import Encoder

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
    epoch: int = 0
    num_skipped: int = 0
    has_ended: bool = False
    quarantined: set[str] = field(default_factory=set[str])
    _buffer: deque[Prompt] = field(default_factory=deque[Prompt])
    _low: asyncio.Event = field(default_factory=asyncio.Event)
    _cache: dict[int, Prompt | None] = field(default_factory=dict[int, "Prompt | None"])

    def take(self) -> Prompt | None:
        """The next prompt, or None when none is encoded yet or the order has ended."""
        if len(self._buffer) <= CHUNK_ROWS:
            self._low.set()
        return self._buffer.popleft() if self._buffer else None

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
        order = visit_order(len(self.rows), self.seed, self.max_epochs)
        num_visits = 0
        while not self.has_ended and (visits := list(islice(order, CHUNK_ROWS))):
            await self._encode([row for _, row in visits])
            for self.epoch, row in visits:
                prompt = self._cache[row]
                if prompt is not None and prompt.prompt_id not in self.quarantined:
                    self._buffer.append(prompt)
            self._trim()
            num_visits += len(visits)
            if num_visits >= len(self.rows) and self.num_skipped == len(self.rows):
                raise DataError(
                    f"none of the {len(self.rows)} training prompts fits into {self.max_prompt_tokens} tokens"
                    " (model.max_context_tokens - sampling.max_tokens)"
                )
            self.changed()
            self._low.clear()
            if len(self._buffer) > CHUNK_ROWS:
                # Unblocked by take(); a run that takes no prompt waits for the learner, which has its own deadline.
                await self._low.wait()
        self.has_ended = True
        self.changed()

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
