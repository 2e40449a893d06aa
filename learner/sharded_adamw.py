"""AdamW over one rank's shard of the float32 master weights, with the norm, the clip and the check over all shards.

ZeRO hands every stage's optimizer the same thing: this rank's flat shard and the mean of its gradient over the ranks.
So the arithmetic of a step stands here once, the same as in the torch backend, and does not depend on how DeepSpeed
divides, clips or skips.

Invariants: all ranks decide alike, from numbers summed over all of them; a gradient that is not finite changes nothing.

Shapes: N weights of this rank's shard.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.training import Optimizer
from learner.backends.base import StepReport


class ShardedAdamW(torch.optim.AdamW):
    """One parameter group; DeepSpeed replaces its parameters by the shard."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: Optimizer, world_size: int) -> None:
        super().__init__(
            parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._max_grad_norm = config.max_grad_norm
        self._world_size = world_size
        self._normaliser = 1.0
        self._is_frozen = False
        self._shard: nn.Parameter | None = None
        self.report = StepReport(math.nan, 0.0, is_skipped=True)

    @property
    def shard(self) -> nn.Parameter:
        """This rank's master weights, float32 [N]; known since the first step (ZeRO-3 shows them only in steps)."""
        if self._shard is None:
            raise RuntimeError("the shard is known since the first step, there was none")
        return self._shard

    def prepare(self, normaliser: float, lr: float) -> None:
        """Before the next step: what divides the gradient's sum over ranks, and the learning rate."""
        self._normaliser = normaliser
        self.param_groups[0]["lr"] = lr
        self.report = StepReport(math.nan, lr, is_skipped=True)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Steps change nothing: DeepSpeed's step then only copies the shards into the weights."""
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Turn the ranks' mean into the divided sum, clip it by its norm over all shards, and step; a collective."""
        if closure is not None:
            raise ValueError("closure must be None: the gradient is there already")
        (self._shard,) = self.param_groups[0]["params"]
        if self._is_frozen:
            return
        grad_N = self.shard.grad
        if grad_N is None:
            raise RuntimeError("the shard must have a gradient, DeepSpeed gave none")
        # The mean was taken over ranks, the sum is wanted.
        scale = self._world_size / self._normaliser
        norm = math.sqrt(self._sum_over_ranks(grad_N)) * scale
        lr = self.param_groups[0]["lr"]
        self.report = StepReport(norm, lr, is_skipped=not math.isfinite(norm))
        if self.report.is_skipped:
            return
        grad_N.mul_(scale * min(1.0, self._max_grad_norm / (norm + 1e-6)))
        super().step()

    def _sum_over_ranks(self, grad_N: Tensor) -> float:
        """Sum of squares over all shards; float64 on the way, so that it does not depend on how they are cut."""
        total = torch.linalg.vector_norm(grad_N, dtype=torch.float64).square()
        dist.all_reduce(total)
        return total.item()
