"""Which tokens of a packed row attend to which, cut into blocks that a kernel takes.

A segment attends in stretches: its prompt to itself, and each response, as a rectangle, to the prompt and itself. So it
costs P² + Σ r (P + r) scores for a prompt of P tokens and responses of r: no response pays for another. A response
alone with its prompt is one stretch with it. Stretches of similar size make up a block.

Invariants: every token of the row is a query of one stretch or more; it sees the keys of its stretch up to itself.

Called by `learner.packing`; `learner.attention` computes what is laid out here.

Shapes: T packed tokens; of a block G stretches, L queries of the one with most, M keys of the one with most.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

MAX_PLAIN_SCORES = 512 * 512
"""Queries times keys of the largest stretch whose attention is computed by plain matrix products."""
MAX_PADDING = 1.25
"""Queries times keys of a block are at most this times the real ones (or it has one stretch), ..."""
SPARE_SCORES = 4096
"""... and this on top: about what one more block costs."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that attend together; places in the packed row."""

    queries: np.ndarray
    """int64, rising."""
    keys: np.ndarray
    """int64, rising, at least as many: what the last query sees. They end with the queries."""

    @property
    def num_scores(self) -> int:
        """Queries times keys."""
        return self.queries.size * self.keys.size

    @property
    def num_earlier(self) -> int:
        """Keys before the first query."""
        return self.keys.size - self.queries.size


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Stretches of similar size, attended together.

    The last query of a stretch sees all its keys, the one before all but the last, and so on.
    """

    queries_GL: Tensor
    """int64: place in the packed row of each query; padding is the first token of its segment."""
    keys_GM: Tensor
    """int64: the same of the keys."""
    mask_GLM: Tensor | None
    """float32: 0 where the query sees the key, -inf elsewhere. None: every stretch has M - L keys before its first
    query, for a fused kernel (see `is_fused`)."""


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which tokens of a packed row see which."""

    blocks: list[AttentionBlock]
    places_T: Tensor
    """int64: place of each packed token among the queries of all blocks, laid end to end."""


def segment_stretches(prompt: np.ndarray, responses: Sequence[np.ndarray]) -> list[Stretch]:
    """Of one segment, from the places of its prompt and of each response."""
    if len(responses) == 1:
        whole = np.concatenate([prompt, responses[0]])
        return [Stretch(whole, whole)]
    return [Stretch(prompt, prompt), *(Stretch(own, np.concatenate([prompt, own])) for own in responses)]


def lay_out(stretches: Sequence[Stretch], num_tokens: int, device: torch.device | str) -> AttentionLayout:
    """The layout of a row of `num_tokens` tokens, each a query of one stretch or more."""
    places = np.empty(num_tokens, dtype=np.int64)
    blocks: list[AttentionBlock] = []
    start = 0
    for members in _similar(stretches, device):
        block = _block(members, device)
        for line, member in enumerate(members):
            # Every segment computes the same output for the shared tokens; the last one's is taken.
            first = start + line * block.queries_GL.shape[1]
            places[member.queries] = np.arange(first, first + member.queries.size)
        start += block.queries_GL.numel()
        blocks.append(block)
    return AttentionLayout(blocks, torch.from_numpy(places).to(device))


def is_fused(stretch: Stretch, device: torch.device | str) -> bool:
    """Whether torch's fused attention takes it.

    On CUDA that is flash attention, faster for what is plainly causal at any length. On CPUs its backward pass is slow,
    so plain products are used up to MAX_PLAIN_SCORES: their memory grows with queries times keys.
    """
    is_causal = torch.device(device).type == "cuda" and not stretch.num_earlier
    return is_causal or stretch.num_scores > MAX_PLAIN_SCORES


def _block(stretches: Sequence[Stretch], device: torch.device | str) -> AttentionBlock:
    """The block of stretches that `_similar` put together."""
    # Padding has weight 0, but 0 times another segment's NaN would be NaN.
    queries = _padded([stretch.queries for stretch in stretches], [stretch.keys[0] for stretch in stretches])
    keys = _padded([stretch.keys for stretch in stretches], [stretch.keys[0] for stretch in stretches])
    mask = None
    if not is_fused(stretches[0], device):
        earlier_G = np.array([stretch.num_earlier for stretch in stretches])
        last_seen_GL = earlier_G[:, None] + np.arange(queries.shape[1])
        is_seen_GLM = np.arange(keys.shape[1]) <= last_seen_GL[:, :, None]
        mask = torch.from_numpy(np.where(is_seen_GLM, np.float32(0.0), np.float32(-np.inf))).to(device)
    return AttentionBlock(torch.from_numpy(queries).to(device), torch.from_numpy(keys).to(device), mask)


def _padded(rows: Sequence[np.ndarray], fills: Sequence[int]) -> np.ndarray:
    """`rows` on top of each other, each filled up at its end."""
    longest = max(row.size for row in rows)
    padded = [np.pad(row, (0, longest - row.size), constant_values=fill) for row, fill in zip(rows, fills, strict=True)]
    return np.stack(padded)


def _similar(stretches: Iterable[Stretch], device: torch.device | str) -> list[list[Stretch]]:
    """`stretches` in runs that share a kernel and are padded by no more than MAX_PADDING and SPARE_SCORES."""

    def earlier(stretch: Stretch) -> int:
        """A fused kernel knows one number of earlier keys, a mask any."""
        return stretch.num_earlier if is_fused(stretch, device) else -1

    def order(stretch: Stretch) -> tuple[int, int, int]:
        # Queries within a fifth of each other count as equal, so that keys have a say.
        return earlier(stretch), round(4 * math.log2(stretch.queries.size)), stretch.keys.size

    runs: list[list[Stretch]] = []
    for _, members in groupby(sorted(stretches, key=order, reverse=True), key=earlier):
        run: list[Stretch] = []
        real = num_queries = num_keys = 0
        for stretch in members:
            real += stretch.num_scores
            num_queries, num_keys = max(num_queries, stretch.queries.size), max(num_keys, stretch.keys.size)
            if not run or (len(run) + 1) * num_queries * num_keys > MAX_PADDING * real + SPARE_SCORES:
                run = []
                runs.append(run)
                real, num_queries, num_keys = stretch.num_scores, stretch.queries.size, stretch.keys.size
            run.append(stretch)
    return runs
