"""A two-layer random Llama and groups for it: real transformers code, milliseconds a pass."""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs import Config
from engine.wire import Span, TrainGroup, TrainSample
from learner.attention import ATTENTION_NAME
from learner.policy import Policy

VOCABULARY = 97


def tiny_llama(*, seed=0, dtype=torch.float32, tied=True, attention=ATTENTION_NAME, layers=2):
    """A random Llama with grouped keys; `attention` names an attention function of transformers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.3,
        attn_implementation=attention, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def tiny_policy(*, chunk_tokens=256, **model):
    """The policy of `tiny_llama(**model)`."""
    return Policy(tiny_llama(**model), chunk_tokens)


def learner_config(**sections):
    """A configuration with a context that fits any token budget; `sections` as in the file."""
    small = {"model": {"max_context_tokens": 16}, "sampling": {"max_tokens": 8}}
    return Config.model_validate(small | sections)


def random_group(rng, group_id=0, prompt=None, lengths=(5, 1, 9), version=0, max_staleness=2):
    """A group with random tokens, logprobs and advantages."""
    prompt = rng.integers(3, VOCABULARY, rng.integers(2, 9)) if prompt is None else prompt
    samples = [
        TrainSample(
            index, rng.integers(3, VOCABULARY, length).astype(np.int32),
            rng.normal(-4.0, 0.5, length).astype(np.float32), [Span(version, 0, length)] if length else [],
            float(index % 2), float(rng.normal()),
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip
    return TrainGroup(
        group_id=group_id, prompt_id=str(group_id), prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        samples=samples, train_version=version, max_staleness=max_staleness,
    )  # fmt: skip


def changed(sample, **changes):
    """The sample with other fields."""
    return TrainSample(**({name: getattr(sample, name) for name in TrainSample.__struct_fields__} | changes))


def with_token_values(rng, group, masked=0.3):
    """The group with an advantage and a weight for each token, some of them 0."""
    group.samples[:] = [
        changed(
            sample,
            token_advantages=rng.normal(size=sample.token_ids.size).astype(np.float32),
            token_weights=(
                rng.uniform(0.2, 2.0, sample.token_ids.size) * (rng.random(sample.token_ids.size) >= masked)
            ).astype(np.float32),
        )
        for sample in group.samples
    ]
    return group
