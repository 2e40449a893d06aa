"""The plain torch backend: one process, bfloat16 passes, a float32 master copy in AdamW.

Invariants:
- Parameters that train are views of one flat buffer, so optimizer, norm and the copy to bfloat16 are single passes.
- Gradients are added up in float32: a bfloat16 sum over micro-batches loses whatever is under 1/256 of it.
- A step with a gradient that is not finite changes nothing.

Shapes: N weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from configs.model_folder import ModelError
from configs.root import Config
from configs.training import Optimizer
from engine.wire import Fingerprint, Float32s, Int32s, TrainGroup
from learner.backends.base import StepReport
from learner.gradient import Gradient, MicroBatchLoss, SampleKey, micro_batches
from learner.policy import Policy, sequence_logprobs
from learner.shards import load_rank, save_rank
from learner.state import adamw_state, load_adamw_state


class TorchBackend:
    """Trains one model on one device."""

    def __init__(self, policy: Policy, config: Config, reference: Policy | None = None) -> None:
        """Take over `policy`, and a frozen `reference` where the loss has a KL penalty, on the device they are on."""
        self._config = config
        self.policy = policy.train()
        self._device = policy.device
        self._loss = MicroBatchLoss(policy, reference, config, self._device)
        self._fingerprint = policy.fingerprint("torch", 1)
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

    @property
    def vocabulary_size(self) -> int:
        """V: token ids are below it."""
        return self.policy.vocabulary_size

    def accumulate(
        self, groups: Sequence[TrainGroup], proximal: Mapping[SampleKey, Float32s] | None = None
    ) -> Gradient:
        """Add the gradient of `groups`; `proximal` = logprobs of the proximal policy, None = the policy as it is."""
        gradient = Gradient()
        for segments in micro_batches(groups, self._config.learner):
            loss, part = self._loss(segments, proximal)
            torch.autograd.backward(loss)
            gradient += part
        return gradient

    def response_logprobs(self, groups: Sequence[TrainGroup]) -> dict[SampleKey, Float32s]:
        """Logprobs of every response token under the policy as it is, at the sampling temperature, nats."""
        logprobs: dict[SampleKey, Float32s] = {}
        for segments in micro_batches(groups, self._config.learner):
            logprobs |= self._loss.response_logprobs(segments)
        return logprobs

    def optimizer_step(self, normaliser: float) -> StepReport:
        """Divide the gradient by `normaliser`, clip it, step, and clear it."""
        optimizer = self._config.optimizer
        lr = optimizer.lr * min(1.0, (self._steps + 1) / max(1, optimizer.warmup_steps))
        grad_norm = torch.linalg.vector_norm(self._grads_N).item() / normaliser
        is_skipped = not math.isfinite(grad_norm)
        if not is_skipped:
            self._steps += 1
            clip = min(1.0, optimizer.max_grad_norm / (grad_norm + 1e-6))
            self._grads_N.mul_(clip / normaliser)
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

    def fingerprint(self) -> Fingerprint:
        """What must be the same before `load_states` makes sense."""
        return self._fingerprint

    def state(self) -> dict[str, Tensor]:
        """Master weights, optimizer moments and counts, each over the one flat buffer; not copied."""
        return {**adamw_state(self._optimizer, self._master_N), "steps": torch.tensor(self._steps)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave, weights included; names, shapes and dtypes were checked."""
        load_adamw_state(self._optimizer, self._master_N, state)
        self._steps = int(state["steps"].item())
        self._weights_N.copy_(self._master_N.detach())

    def save_states(self, folder: Path) -> None:
        """Write the training state into `folder`."""
        save_rank(folder, 0, 1, self.state())

    def load_states(self, folder: Path) -> None:
        """Take over what `save_states` wrote, weights included."""
        self.load_state(load_rank(folder, 0, 1, self.state()))

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
