"""The plain torch backend: one process, bfloat16 passes, a float32 master copy in AdamW.

Invariants:
- Parameters that train are views of one flat buffer, so optimizer, norm and the copy to bfloat16 are single passes.
- Gradients are added up in float32: a bfloat16 sum over micro-batches loses whatever is under 1/256 of it.
- A step with a gradient that is not finite changes nothing but the count of steps.

Shapes: N weights, R response tokens.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from configs.model_folder import ModelError
from configs.root import Config
from configs.training import Optimizer
from engine.wire import Float32s, Int32s, TrainGroup
from learner.backends.base import StepReport
from learner.losses import TokenSums, policy_loss
from learner.packing import fill_micro_batches, pack, split_groups
from learner.policy import Policy, sequence_logprobs

logger = logging.getLogger(__name__)


class TorchBackend:
    """Trains one model on one device."""

    def __init__(self, policy: Policy, config: Config, device: str = "cpu") -> None:
        self._config = config
        self.policy = policy.to(device).train()
        self._device = torch.device(device)
        self._flatten()
        self._optimizer = _adamw(self._master_N, config.optimizer)
        self._steps = 0

    def _flatten(self) -> None:
        """Make every parameter that trains a view of one buffer; add its gradients to float32 sums as they appear."""
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() for parameter in parameters)
        dtype = parameters[0].dtype
        self._weights_N = torch.empty(total, dtype=dtype, device=self._device)
        self._grads_N = torch.zeros(total, dtype=torch.float32, device=self._device)
        start = 0
        for parameter in parameters:
            if parameter.dtype != dtype:
                raise ModelError(f"all weights must have one dtype, got {dtype} and {parameter.dtype}")
            end = start + parameter.numel()
            view = self._weights_N[start:end].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            self._sum_gradients(parameter, self._grads_N[start:end].view_as(parameter))
            start = end
        self._master_N = nn.Parameter(self._weights_N.float())

    def _sum_gradients(self, parameter: nn.Parameter, sums: Tensor) -> None:
        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                sums.add_(parameter.grad)
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(add)

    def accumulate(self, groups: Sequence[TrainGroup]) -> tuple[TokenSums, int]:
        """Add the gradient of `groups`; the sums over their tokens and how many packed tokens were computed."""
        sums, packed_tokens = TokenSums(), 0
        learner = self._config.learner
        shares = learner.share_prefixes
        for segments in fill_micro_batches(split_groups(groups, share_prefixes=shares), learner.micro_batch_tokens):
            batch = pack(segments, self._device, share_prefixes=shares)
            logprobs_R, entropy_R = self.policy(batch, self._config.sampling.temperature)
            loss, batch_sums = policy_loss(
                logprobs_R, batch.behaviour_logprobs_R, batch.advantages_R, entropy_R, self._config.loss
            )
            torch.autograd.backward(loss)
            sums += batch_sums
            packed_tokens += batch.num_packed_tokens
        return sums, packed_tokens

    def optimizer_step(self, num_response_tokens: int) -> StepReport:
        """Divide the gradient by `num_response_tokens`, clip it, step, and clear it."""
        optimizer = self._config.optimizer
        self._steps += 1
        lr = optimizer.lr * min(1.0, self._steps / max(1, optimizer.warmup_steps))
        grad_norm = torch.linalg.vector_norm(self._grads_N).item() / max(1, num_response_tokens)
        is_skipped = not np.isfinite(grad_norm)
        if is_skipped:
            logger.warning("step %s skipped: its gradient is not finite", self._steps)
        else:
            clip = min(1.0, optimizer.max_grad_norm / (grad_norm + 1e-6))
            self._grads_N.mul_(clip / max(1, num_response_tokens))
            self._master_N.grad = self._grads_N
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._weights_N.copy_(self._master_N.detach())
        self._grads_N.zero_()
        return StepReport(grad_norm, lr, is_skipped)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its HF name as it is now; a tied head too, as the same tensor."""
        return self.policy.weights()

    def sequence_logprobs(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence [T]: [T - 1], nats."""
        return sequence_logprobs(self.policy, sequences, self._device)

    def save_model(self, folder: Path) -> None:
        """Write weights, configuration and generation configuration in HF format."""
        self.policy.save_model(folder)


def _adamw(master_N: nn.Parameter, config: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [master_N],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
