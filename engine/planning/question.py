"""What a plan is asked for: the prompts, the model and the machines."""

import math
from dataclasses import dataclass

from configs.load import ConfigError

BF16_BYTES = 2
LEARNER_BYTES = 18
"""A parameter in the learner, by its code: bf16 weights 2, fp32 gradient sums 4, fp32 master copy 4, AdamW's two fp32
moments 8. Activations are not in it."""
_KV_BYTES = 131_072
"""KV cache of a token at `_KV_PARAMS` parameters: 32 layers x 8 key-value heads x 128 x (key, value) x 2 bytes."""
_KV_PARAMS = 8e9


@dataclass(frozen=True, slots=True)
class Question:
    """Inputs of a plan; `check` refuses what makes no sense."""

    generation_tokens_per_s: float
    """Of one GPU that generates, over all its slots, prefill included."""
    learner_tokens_per_s: float
    """Of one GPU that learns, forward and backward, packed tokens (each prompt once a group)."""
    pass_rate: str = "tiers"
    """Law of p: `tiers`, a number, a list, or a profile file (engine/profiles.py)."""
    params: float = 1.5e9
    """Parameters of the model: for the memory estimate only."""
    gpus: int = 8
    """GPUs, each of which holds the model for generation (one worker a GPU)."""
    response_tokens: float = 512.0
    """Mean length of a response."""
    prompt_tokens: float = 128.0
    """Mean length of a prompt."""
    groups_per_step: int = 128
    """B. 128 prompts are a mini-batch of arXiv 2510.04996."""
    slots: int = 64
    """Requests that one generating GPU runs at once."""
    kv_bytes_per_token: float = 0.0
    """0 = estimated from `params`."""
    samples: int = 12_000
    """Samples of one simulated run, about."""
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers that no machine has.

        Raises:
            ConfigError: names the flag, the value and what is allowed.
        """
        speeds = {
            "generation-tokens-per-s": self.generation_tokens_per_s,
            "learner-tokens-per-s": self.learner_tokens_per_s,
            "params": self.params,
            "response-tokens": self.response_tokens,
        }
        for flag, value in speeds.items():
            if not (value > 0.0 and math.isfinite(value)):
                raise ConfigError(f"--{flag} must be a finite number above 0, got {value:g}")
        for flag, value in (("prompt-tokens", self.prompt_tokens), ("kv-bytes-per-token", self.kv_bytes_per_token)):
            if not (value >= 0.0 and math.isfinite(value)):
                raise ConfigError(f"--{flag} must be a finite number >= 0, got {value:g}")
        counts = {"gpus": self.gpus, "groups-per-step": self.groups_per_step, "slots": self.slots}
        for flag, value in counts.items():
            if value < 1:
                raise ConfigError(f"--{flag} must be an integer >= 1, got {value}")
        if self.samples < 1000:
            raise ConfigError(f"--samples must be an integer >= 1000, got {self.samples}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be an integer >= 0, got {self.seed}")

    def trained_tokens(self, kept: int) -> float:
        """Packed tokens of one group: its prompt once, and the kept responses."""
        return self.prompt_tokens + kept * self.response_tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """Rough bytes of GPU memory; estimates, not measurements."""

    generation_weights: float
    """One bf16 copy."""
    kv_cache: float
    """All slots of one GPU full at mean lengths; nothing shared between the samples of a prompt."""
    kv_bytes_per_token: float
    learner: float
    """On one GPU, not sharded, without activations."""


def estimate_memory(question: Question) -> Memory:
    """Bytes on one generating and on one learning GPU.

    The KV cache of a token is 2 x layers x key-value heads x head size x 2 bytes. Without `kv_bytes_per_token` it is
    taken from a model of 8e9 parameters with 32 layers and 8 key-value heads of 128, times the square root of the ratio
    of parameters (own rule): models differ by a factor of two or three, so give the real number where it matters.
    """
    per_token = question.kv_bytes_per_token or _KV_BYTES * math.sqrt(question.params / _KV_PARAMS)
    tokens = question.slots * (question.prompt_tokens + question.response_tokens)
    return Memory(BF16_BYTES * question.params, tokens * per_token, per_token, LEARNER_BYTES * question.params)
