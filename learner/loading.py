"""From a model folder to a policy that is ready to train, or to the frozen reference of a KL penalty.

Invariants: what comes back computes what transformers computes by itself, in training mode too, wherever sequences to
check it on are given; what this learner cannot compute is an error here, not at the first group. The order is fixed:
the model's own logprobs are taken before kernels and adapters go in and compared after, and layers are compiled last.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils.import_utils import is_liger_kernel_available

from configs.load import ConfigError
from configs.model_folder import ModelError, check_model, is_hub_name
from configs.root import Config
from configs.training import Learner
from engine.wire import Int32s
from learner.attention import ATTENTION_NAME
from learner.dropout import remove_dropout
from learner.own_forward import OwnLogprobs, own_logprobs
from learner.policy import Policy

logger = logging.getLogger(__name__)


def load_policy(config: Config, dtype: torch.dtype = torch.bfloat16, sequences: Sequence[Int32s] = ()) -> Policy:
    """The causal language model at `model.path`, set up as `learner` says, on its device.

    Args:
        config: `model.path` (a folder, or a hub name) and the sections `learner` and `lora`.
        dtype: Of the weights.
        sequences: int32 token ids [T], at least two each, on which it must compute what the model does by itself; none
            on a rank that has the same model as one that was checked.

    Raises:
        ConfigError: `learner.device` is not here, or `learner.compile` cannot compile.
        ModelError: none there, or not a causal language model that this learner can train.
    """
    learner = config.learner
    device = choose_device(learner)
    model = _load_model("model.path", config.model.path, dtype)
    cast("nn.Module", model).to(device)
    own = own_logprobs(model, sequences) if sequences else []
    if wants_liger(device, is_installed=is_liger_kernel_available()):
        # Norms, rotary embeddings and MLPs; the head stays ours.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    policy = Policy(model, learner.logprob_chunk_tokens, config.lora).to(device)
    if learner.activation_checkpointing:
        policy.checkpoint_activations()
    if own:
        _check(f"model.path {config.model.path}", policy, own, config.model.max_context_tokens)
    if learner.compile:
        policy.compile_layers()
    return policy


def load_reference(config: Config, policy: Policy, sequences: Sequence[Int32s] = ()) -> Policy | None:
    """The frozen policy of the KL penalty; None, and nothing loaded, where `loss.kl.weight` is 0.

    Args:
        config: The section `loss.kl`, and as for `load_policy`.
        policy: What is compared with it: same dtype, same device.
        sequences: As for `load_policy`.

    Raises:
        ModelError: as `load_policy`, or it has another vocabulary than `policy`.
    """
    if not config.loss.kl.weight:
        return None
    key, path = "loss.kl.reference", config.loss.kl.reference
    if not path:
        key, path = "model.path", config.model.path
    model = _load_model(key, path, policy.head.weight.dtype)
    reference = Policy(model, config.learner.logprob_chunk_tokens).to(policy.device)
    if reference.vocabulary_size != policy.vocabulary_size:
        raise ModelError(
            f"{key} {path} must have the vocabulary of model.path, {policy.vocabulary_size} tokens, "
            f"got {reference.vocabulary_size}"
        )
    if sequences:
        _check(f"{key} {path}", reference, own_logprobs(model, sequences), config.model.max_context_tokens)
    return reference.eval().requires_grad_(False)


def wants_liger(device: torch.device, *, is_installed: bool) -> bool:
    """Whether a policy on `device` gets Liger's fused kernels (Triton, so CUDA only); installing them is the switch."""
    return is_installed and device.type == "cuda"


def choose_device(config: Learner) -> torch.device:
    """The device that `learner.device` names.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("learner.device is cuda, but torch finds no CUDA device on this machine; allowed: auto, cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def _load_model(key: str, path: str, dtype: torch.dtype) -> PreTrainedModel:
    check_model(path, key)
    try:
        model = cast(
            "PreTrainedModel",
            AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=not is_hub_name(path)
            ),
        )
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"{key} {path} must hold a causal language model: {exc}") from exc
    if removed := remove_dropout(model):
        values = ", ".join(f"{name} {value:g}" for name, value in removed.items())
        logger.info("%s %s: switched off what is random in training: %s", key, path, values)
    return model


def _check(key: str, policy: Policy, own: Sequence[OwnLogprobs], max_context_tokens: int) -> None:
    """Refuse what differs from `own`, and layers that see less than a whole context: short sequences don't show it."""
    with _noted_windows() as spans:
        difference = policy.check_forward(own)
    chunk = getattr(policy.model.config.get_text_config(), "attention_chunk_size", None)
    if isinstance(chunk, int):  # transformers puts it into a mask, which ours never gets
        spans.add(chunk)
    if spans and min(spans) < max_context_tokens:
        raise ModelError(
            f"model.max_context_tokens must be at most {min(spans)}, the tokens that a layer of {key} "
            f"({type(policy.model).__name__}) sees, got {max_context_tokens}"
        )
    logger.info("packed forward pass of %s within %.1g nats of its own", key, difference)


@contextmanager
def _noted_windows() -> Iterator[set[int]]:
    """Sliding windows that layers ask our attention for inside the `with`."""
    windows: set[int] = set()
    before = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]

    def attend(*arguments: object, **options: object) -> object:
        if isinstance(window := options.get("sliding_window"), int):
            windows.add(window)
        return before(*arguments, **options)

    AttentionInterface.register(ATTENTION_NAME, attend)
    try:
        yield windows
    finally:
        AttentionInterface.register(ATTENTION_NAME, before)
