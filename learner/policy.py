"""The policy as one module: the whole forward pass of a causal language model, from packed tokens to logprobs.

Invariants:
- Every parameter is used inside the `forward` of the module that owns it, so an engine that wraps modules (sharded
  parameters gathered call by call, recomputed activations, adapters) sees every use. The head is therefore a module of
  its own here; where it is tied it shares the input embedding's parameter.
- Weights go out under the names that transformers gives them.
- It computes what transformers computes by itself, in training mode: `check_forward` compares.

`learner.loading` builds it; backends wrap it as they like and call the wrapper.

Shapes: T packed tokens, D hidden size, V vocabulary, R response tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from configs.load import ConfigError
from configs.lora import Lora
from configs.model_folder import ModelError
from engine.wire import Fingerprint, Float32s, Int32s, TrainSample
from learner.attention import ATTENTION_NAME, packed_attention
from learner.full_precision import full_precision
from learner.logprobs import chunked_logprobs
from learner.lora import Adapters, base_name
from learner.own_forward import OwnLogprobs
from learner.packing import MicroBatch, Segment, pack

MAX_SELF_CHECK_NATS = 0.01
"""The same float32 arithmetic in another order differs by 2e-5 (SmolLM2-135M), attention or a head that leaves
something out by 0.2 and more."""


class LogprobHead(nn.Module):
    """The output embedding: hidden states to logprobs and entropies, chunk by chunk."""

    def __init__(self, weight_VD: nn.Parameter, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = weight_VD
        self._chunk_tokens = chunk_tokens

    def forward(self, hidden_RD: Tensor, targets_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """float32 logprobs [R] of `targets_R` and entropies [R], nats."""
        return chunked_logprobs(hidden_RD, self.weight, targets_R, temperature, self._chunk_tokens)


class Policy(nn.Module):
    """Trunk and head of one causal language model."""

    def __init__(self, model: PreTrainedModel, chunk_tokens: int, lora: Lora | None = None) -> None:
        """Take over `model`, which must attend by `learner.attention`.

        Args:
            model: Its parameters become this module's, the same objects.
            chunk_tokens: Rows of logits that exist at once.
            lora: With a rank above 0: the model gets adapters, and only they train.

        Raises:
            ModelError: the head is not a linear layer without bias.
        """
        super().__init__()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelError("the model's head must be a linear layer without bias")
        self._adapters = Adapters(model, lora) if lora and lora.rank else None
        # Kept in a tuple, out of the module tree: its own head would be a module whose forward nobody calls.
        self._whole = (model,)
        self._vocabulary_size = head.weight.shape[0]
        self.trunk = cast("nn.Module", model.base_model)
        self.head = LogprobHead(cast("nn.Parameter", head.weight), chunk_tokens)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model whose parameters these are."""
        return self._whole[0]

    @property
    def vocabulary_size(self) -> int:
        """V: rows of the output embedding."""
        return self._vocabulary_size

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.head.weight.device

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs of the batch's targets and the entropies there.

        Args:
            batch: One packed row, on the parameters' device.
            temperature: Logits are divided by it.

        Returns:
            float32 logprobs [R] and entropies [R], nats.
        """
        output = self.trunk(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            use_cache=False,
            layout=batch.layout,
        )
        hidden_RD = output.last_hidden_state[0].index_select(0, batch.predictors_R)
        return self.head(hidden_RD, batch.targets_R, temperature)

    def checkpoint_activations(self) -> None:
        """Keep only the input of each layer in training passes and compute the layer again in the backward pass.

        Raises:
            ModelError: the architecture cannot.
        """
        if not self.model.supports_gradient_checkpointing:
            raise ModelError(f"learner.activation_checkpointing must be false for {type(self.model).__name__}")
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def compile_layers(self) -> None:
        """Compile each layer of the trunk for every length, and try it with a pass forward and back.

        Attention is left out: the number of its blocks changes from batch to batch, and each would be a compilation.

        Raises:
            ConfigError: torch cannot compile here (no C++ compiler, say).
        """
        from torch._dynamo.exc import TorchDynamoException  # seconds to import

        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
        for module in self.trunk.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(dynamic=True)
        tokens = np.arange(4, dtype=np.int32) % self.vocabulary_size
        try:
            logprobs_R, _ = self(pack([Segment(tokens[:1], [_as_sample(tokens[1:])])], self.device), 1.0)
            torch.autograd.backward(logprobs_R.sum())
        except (TorchDynamoException, RuntimeError) as exc:
            reason = str(exc).strip().splitlines()[0]
            raise ConfigError(f"learner.compile must be false here, torch.compile fails: {reason}") from exc
        self.zero_grad(set_to_none=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its HF name as it is now, adapters merged; a tied head too, as the same tensor."""
        if self._adapters:
            yield from self._adapters.weights()
            return
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            yield name, parameter.detach()

    def save_model(self, folder: Path, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Write weights, configuration and generation configuration in HF format, adapters merged and once more alone.

        Args:
            folder: Where to.
            weights: All of them under their HF names, for a backend that has gathered them; default: `weights()`.
        """
        unique = {base_name(name) for name, _ in self.model.named_parameters()}
        # Own storage for each tensor: views of one buffer would look like tied weights.
        state = {
            name: tensor.clone() for name, tensor in (self.weights() if weights is None else weights) if name in unique
        }
        self.model.save_pretrained(folder, state_dict=state)
        if self._adapters:
            self._adapters.save(folder)

    def fingerprint(self, backend: str, num_ranks: int) -> Fingerprint:
        """What must be the same before a state of `backend` on `num_ranks` ranks can be loaded; reads frozen weights.

        Called before an engine shards the parameters.
        """
        return Fingerprint(
            backend,
            type(self.model).__name__,
            str(self.head.weight.dtype).removeprefix("torch."),
            num_ranks,
            {name: list(parameter.shape) for name, parameter in self.model.named_parameters()},
            lora_alpha=self._adapters.alpha if self._adapters else 0.0,
            frozen=self._adapters.frozen_sum() if self._adapters else "",
        )

    def check_forward(self, own: Sequence[OwnLogprobs]) -> float:
        """Largest difference between our logprobs and those of the model's own forward pass, nats.

        Computes in float32, and in training mode, which it leaves on: what is random there shows. Sequences are packed
        each alone, and those that begin with the same token also as responses of one prompt. Called before an engine
        shards the parameters and before layers are compiled.

        Args:
            own: What `own_logprobs` said before anything was put into the model.

        Raises:
            ModelError: our attention cannot compute this architecture, or they differ by more than rounding: the model
                scales its logits, say, or hides a mask.
        """
        families: dict[int, list[OwnLogprobs]] = {}
        for each in own:
            families.setdefault(int(each.tokens[0]), []).append(each)
        packed = [*([each] for each in own), *(family for family in families.values() if len(family) > 1)]
        theirs_R = np.concatenate([each.logprobs for family in packed for each in family])
        name = type(self.model).__name__
        try:
            ours_R = self.train()._logprobs([[each.tokens for each in family] for family in packed])
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError) as exc:
            raise ModelError(f"{name} is not supported: {exc}") from exc
        worst = float(np.abs(theirs_R - ours_R).max())
        if not worst <= MAX_SELF_CHECK_NATS:
            raise ModelError(
                f"packed logprobs must equal the model's own within {MAX_SELF_CHECK_NATS} nats, they differ by "
                f"{worst:.3g}: the architecture is not supported: {name}"
            )
        return worst

    def _logprobs(self, families: Sequence[Sequence[Int32s]]) -> Float32s:
        """Logprobs of all but the first token of sequences, one after the other; those of a family share that one."""
        segments = [Segment(family[0][:1], [_as_sample(tokens[1:]) for tokens in family]) for family in families]
        with full_precision(self), torch.no_grad():
            logprobs_R, _ = self(pack(segments, self.device), 1.0)
        return logprobs_R.cpu().numpy()


def sequence_logprobs(
    policy: Callable[[MicroBatch, float], tuple[Tensor, Tensor]],
    sequences: Sequence[Int32s],
    device: torch.device,
) -> list[Float32s]:
    """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence.

    Args:
        policy: A `Policy`, or whatever wraps one.
        sequences: int32 token ids [T], at least two each.
        device: Where the policy computes.

    Returns:
        [T - 1] nats for each sequence.
    """
    segments = [Segment(tokens[:1], [_as_sample(tokens[1:])]) for tokens in sequences]
    with torch.inference_mode():
        logprobs_R, _ = policy(pack(segments, device), 1.0)
    ends = np.cumsum([tokens.size - 1 for tokens in sequences])
    return [part.copy() for part in np.split(logprobs_R.cpu().numpy(), ends[:-1])]


def _as_sample(tokens: Int32s) -> TrainSample:
    return TrainSample(0, tokens, np.zeros(tokens.size, np.float32), [], 0.0, 0.0)
