"""The plain torch backend: one process, bfloat16 passes, a float32 master copy in AdamW.

Invariants:
- Parameters are views of one flat buffer, so the optimizer, the norm and the copy to bfloat16 are single passes.
- Gradients are added up in float32: a bfloat16 sum over micro-batches loses whatever is under 1/256 of it.
- A step with a gradient that is not finite changes nothing but the count of steps.
- The model computes what transformers computes: checked against its own forward pass when loaded.

Shapes: N weights, T packed tokens, D hidden size, V vocabulary, R response tokens.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from configs.model_folder import ModelError, check_model, is_hub_name
from configs.root import Config
from configs.training import Optimizer
from engine.wire import Fingerprint, Float32s, Int32s, TrainGroup, TrainSample
from learner.attention import ATTENTION_NAME
from learner.backends.base import StepReport
from learner.logprobs import chunked_logprobs
from learner.losses import TokenSums, policy_loss
from learner.packing import MicroBatch, Segment, fill_micro_batches, pack, split_groups
from learner.state import adamw_state, load_adamw_state

logger = logging.getLogger(__name__)

MAX_SELF_CHECK_NATS = 0.05
"""The same bfloat16 arithmetic in another order differs by 2e-5 (SmolLM2-135M); a scaled or capped head by nats."""


def load_model(path: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The causal language model at `path` (a folder, or a hub name), with packed attention.

    Raises:
        ModelError: none there, or not a causal language model that this learner can train.
    """
    check_model(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=not is_hub_name(path)
        )
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"model.path {path} must hold a causal language model: {exc}") from exc
    return cast("PreTrainedModel", model)


class TorchBackend:
    """Trains one model on one device."""

    def __init__(self, model: PreTrainedModel, config: Config, device: str = "cpu") -> None:
        self._config = config
        self._model = model.to(device).train()  # type: ignore[arg-type]  (transformers types `to` as a wrapper)
        self._trunk = cast("nn.Module", model.base_model)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelError("the model's head must be a linear layer without bias")
        self._head_weight = head.weight
        self._device = torch.device(device)
        self._flatten()
        self._optimizer = _adamw(self._master_N, config.optimizer)
        self._steps = 0

    def _flatten(self) -> None:
        """Make every parameter a view of one buffer; add its gradients to float32 sums as they appear."""
        parameters = list(self._model.parameters())
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
        for segments in fill_micro_batches(split_groups(groups), self._config.learner.micro_batch_tokens):
            batch = pack(segments, self._device)
            logprobs_R, entropy_R = self._logprobs(batch, self._config.sampling.temperature)
            loss, batch_sums = policy_loss(
                logprobs_R, batch.behaviour_logprobs_R, batch.advantages_R, entropy_R, self._config.loss
            )
            torch.autograd.backward(loss)
            sums += batch_sums
            packed_tokens += batch.num_packed_tokens
        return sums, packed_tokens

    def _logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        output = self._trunk(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            use_cache=False,
            layout=batch.layout,
        )
        hidden_RD = output.last_hidden_state[0].index_select(0, batch.predictors_R)
        chunk_tokens = self._config.learner.logprob_chunk_tokens
        return chunked_logprobs(hidden_RD, self._head_weight, batch.targets_R, temperature, chunk_tokens)

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
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            yield name, parameter.detach()

    def sequence_logprobs(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence [T]: [T - 1], nats."""
        segments = [Segment(tokens[:1], [_as_sample(tokens[1:])]) for tokens in sequences]
        with torch.inference_mode():
            logprobs_R, _ = self._logprobs(pack(segments, self._device), temperature=1.0)
        ends = np.cumsum([tokens.size - 1 for tokens in sequences])
        return [part.copy() for part in np.split(logprobs_R.cpu().numpy(), ends[:-1])]

    def check_forward(self, sequences: Sequence[Int32s]) -> float:
        """Largest difference between our logprobs and those of the model's own forward pass, nats.

        Raises:
            ModelError: they differ by more than rounding: the model scales its logits, say, or hides a mask.
        """
        worst = 0.0
        for tokens, ours in zip(sequences, self.sequence_logprobs(sequences), strict=True):
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
            with torch.inference_mode():
                logits_TV = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                theirs_T = logits_TV.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            worst = max(worst, float(np.abs(theirs_T.cpu().numpy() - ours).max()))
        if not worst <= MAX_SELF_CHECK_NATS:
            raise ModelError(
                f"packed logprobs must equal the model's own within {MAX_SELF_CHECK_NATS} nats, they differ by "
                f"{worst:.3g}: this architecture is not supported"
            )
        return worst

    def fingerprint(self) -> Fingerprint:
        """What must be the same before `load_state` makes sense."""
        parameters = {name: list(parameter.shape) for name, parameter in self._model.named_parameters()}
        dtype = str(self._weights_N.dtype).removeprefix("torch.")
        return Fingerprint("torch", type(self._model).__name__, dtype, 1, parameters)

    def state(self) -> dict[str, Tensor]:
        """Master weights, optimizer moments and counts, each over the one flat buffer; not copied."""
        return {**adamw_state(self._optimizer, self._master_N), "steps": torch.tensor(self._steps)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave, weights included; names, shapes and dtypes were checked."""
        load_adamw_state(self._optimizer, self._master_N, state)
        self._steps = int(state["steps"].item())
        self._weights_N.copy_(self._master_N.detach())

    def save_model(self, folder: Path) -> None:
        """Write weights, configuration and generation configuration in HF format."""
        # Own storage for each tensor: views of one buffer would look like tied weights.
        state = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self._model.save_pretrained(folder, state_dict=state)


def _adamw(master_N: nn.Parameter, config: Optimizer) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [master_N],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _as_sample(tokens: Int32s) -> TrainSample:
    return TrainSample(0, tokens, np.zeros(tokens.size, np.float32), [], 0.0, 0.0)
