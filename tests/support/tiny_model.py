"""A tiny random Llama with a byte-level tokenizer and a chat template, as a plain HF folder."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save_tiny_model(folder: Path, *, is_tied: bool, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
    """Make and save one; returns it, in evaluation mode."""
    disable_progress_bar()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=288, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, tie_word_embeddings=is_tied,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.15, dtype=dtype,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int, scale: float = 0.3) -> None:
    """Move every matrix by `scale` of its spread."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * scale * parameter.float().std()).to(parameter.dtype))


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T-1] logprob of token t+1 given tokens 0..t: one plain forward pass, float32 softmax."""
    logits = model(torch.tensor([token_ids])).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def named_weights(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """What a learner sends: every parameter, and the head even where it is tied."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return list({**weights, "lm_head.weight": model.lm_head.weight.detach()}.items())
