"""The DeepSpeed backend: ZeRO stages 1 to 3 over one or many ranks, gloo on CPUs and NCCL on GPUs.

Invariants:
- Every method is collective: all ranks call the same ones in the same order with the arguments that must agree.
- All ranks run the same number of backward passes, since gradients (and with ZeRO-3 weights) move in their hooks; a
  rank with less work pads with passes whose gradient is zero.
- Gradients are sums in float32, across passes and across ranks; the step divides them once (learner/sharded_adamw.py).
- One parameter group and one sub-group, so a rank's shard is one flat tensor in every stage (learner/shards.py).

Each rank holds the whole model once while it starts.

Shapes: R response tokens.
"""

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta

import deepspeed
import deepspeed.ops
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from configs.root import Config
from configs.training import Learner
from engine.wire import Fingerprint, Float32s, Int32s, TrainGroup, TrainSample
from learner.backends.base import StepReport
from learner.gradient import Gradient, MicroBatchLoss, SampleKey, micro_batches
from learner.packing import Segment
from learner.policy import Policy, sequence_logprobs
from learner.sharded_adamw import ShardedAdamW
from learner.shards import STAGE
from learner.state import adamw_state, load_adamw_state

_NEVER = 10**12


class DeepSpeedBackend:
    """This rank's part of one model and its optimizer; the process group exists already."""

    def __init__(self, policy: Policy, config: Config, reference: Policy | None = None) -> None:
        """Split `policy`, which is the same on every rank, over the ranks; each keeps a `reference` whole."""
        self._config = config
        self.policy = policy.train()
        self._device = policy.device
        self._is_whole = config.learner.zero_stage < 3
        self._optimizer = ShardedAdamW(policy.parameters(), config.optimizer, dist.get_world_size())
        self._steps = 0
        dtype = policy.head.weight.dtype
        # Taken now: ZeRO-3 leaves parameters without a shape.
        self._fingerprint = policy.fingerprint(f"deepspeed ZeRO-{config.learner.zero_stage}", dist.get_world_size())
        _quieten()
        # The op would be compiled at the first start, for 40 s, and is not needed: gloo reduces by itself.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the memory of every stage
            self._engine, *_ = deepspeed.initialize(
                model=policy, optimizer=self._optimizer, config=zero_config(config.learner, dtype)
            )
        _set_deadline(config.learner.rank_deadline_s)
        self._loss = MicroBatchLoss(self._engine, reference, config, self._device)
        self._copy_shards()

    def _copy_shards(self) -> None:
        """Make the weights those of the shards, by a step that changes none; the first one shows us our shard."""
        self.accumulate([], num_passes=1)
        with self._optimizer.frozen():
            self._engine.step()

    def accumulate(
        self, groups: Sequence[TrainGroup], num_passes: int, proximal: Mapping[SampleKey, Float32s] | None = None
    ) -> Gradient:
        """Add the gradient of this rank's `groups`.

        Args:
            groups: May be none.
            num_passes: Backward passes of every rank; at least as many as this rank's groups need.
            proximal: Logprobs of the proximal policy for these groups, nats; None = those of the policy as it is.

        Returns:
            What this rank added.
        """
        gradient = Gradient()
        batches = micro_batches(groups, self._config.learner)
        for segments in batches:
            loss, part = self._loss(segments, proximal)
            self._engine.backward(loss)
            gradient += part
        for _ in range(num_passes - len(batches)):
            # The same graph as a real pass: ZeRO-3 counts which outputs a backward pass has reached.
            loss, _ = self._loss([_padding()], None if proximal is None else _PADDING_PROXIMAL)
            self._engine.backward(loss * 0.0)
        return gradient

    def response_logprobs(self, groups: Sequence[TrainGroup], num_passes: int) -> dict[SampleKey, Float32s]:
        """Logprobs of this rank's responses under the policy as it is, at the sampling temperature, nats.

        Args:
            groups: May be none.
            num_passes: As for `accumulate`.
        """
        logprobs: dict[SampleKey, Float32s] = {}
        batches = micro_batches(groups, self._config.learner)
        for segments in batches:
            logprobs |= self._loss.response_logprobs(segments)
        for _ in range(num_passes - len(batches)):
            self._loss.response_logprobs([_padding()])
        return logprobs

    def optimizer_step(self, normaliser: float) -> StepReport:
        """Divide the gradient by `normaliser`, clip it, step, and clear it; the same report on every rank."""
        optimizer = self._config.optimizer
        lr = optimizer.lr * min(1.0, (self._steps + 1) / max(1, optimizer.warmup_steps))
        self._optimizer.prepare(normaliser, lr)
        # DeepSpeed does not even call the optimizer for some gradients that are not finite; the report then says so.
        self._engine.step()
        report = self._optimizer.report
        self._steps += not report.is_skipped
        return report

    def weights(self, *, keeps: bool) -> list[tuple[str, Tensor]]:
        """Every parameter under its HF name as it is now; a tied head too, as the same tensor.

        Args:
            keeps: This rank wants them; with ZeRO-3 they are then copies in host memory.

        Returns:
            Names and weights; none without `keeps`.
        """
        gathered: dict[int, Tensor] = {}
        named: list[tuple[str, Tensor]] = []
        for name, parameter in self.policy.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in gathered:
                gathered[id(parameter)] = self._gather(parameter, keeps=keeps)
            named.append((name, gathered[id(parameter)]))
        return named if keeps else []

    def sequence_logprobs(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence [T]: [T - 1], nats."""
        return sequence_logprobs(self._engine, sequences, self._device)

    def fingerprint(self) -> Fingerprint:
        """What must be the same before `load_state` makes sense."""
        return self._fingerprint

    def state(self) -> dict[str, Tensor]:
        """This rank's shards of master weights and moments, and the counts; not copied, valid until the next step."""
        return {
            **adamw_state(self._optimizer, self._optimizer.shard),
            "steps": torch.tensor(self._steps),
            STAGE: torch.tensor(self._config.learner.zero_stage),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave on as many ranks with the same stage, weights included."""
        load_adamw_state(self._optimizer, self._optimizer.shard, state)
        self._steps = int(state["steps"].item())
        self._copy_shards()

    def close(self) -> None:
        """Let go of the process group, which then can be destroyed; without this ZeRO-3 aborts at exit."""
        self._engine.destroy()
        del self._engine
        gc.collect()
        dist.barrier()

    def _gather(self, parameter: Tensor, *, keeps: bool) -> Tensor:
        if self._is_whole:
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to("cpu", copy=True) if keeps else torch.empty(0)


def zero_config(config: Learner, dtype: torch.dtype) -> dict[str, object]:
    """DeepSpeed's configuration: it splits and moves, all arithmetic of a step is the optimizer's."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": config.zero_stage, "sub_group_size": _NEVER},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
    }


def _set_deadline(deadline_s: float) -> None:
    """Of every process group: DeepSpeed makes its own ones, with torch's 30 minutes (NCCL: 10)."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s), group)


_PADDING_PROXIMAL: dict[SampleKey, Float32s] = {(-1, 0): np.zeros(1, dtype=np.float32)}


def _padding() -> Segment:
    """The smallest pass: one response token."""
    token = np.zeros(1, dtype=np.int32)
    return Segment(token, [TrainSample(0, token, np.zeros(1, dtype=np.float32), [], 0.0, 0.0)])


def _quieten() -> None:
    """Keep what DeepSpeed says about itself out of the log."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
