"""The training step one writes first with transformers: pad, take all logits, differentiate, let AdamW step.

Used by `benchmarks/naive_loop.py` and as the plain side of `benchmarks/learner.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

CLIP_LOW, CLIP_HIGH, MAX_GRAD_NORM = 0.2, 0.28, 1.0


@dataclass
class Sample:
    """One response and its reward."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    reward: float
    advantage: float = 0.0


class PlainLearner:
    """bf16 weights, an fp32 master in AdamW, micro-batches padded to their longest sample."""

    def __init__(self, path: str, lr: float, *, micro_batch: int, fused: bool = False, by_length: bool = True) -> None:
        """Load a model.

        Args:
            path: Model folder.
            lr: Learning rate.
            micro_batch: Samples of a pass.
            fused: AdamW in one pass over each weight.
            by_length: Sort samples, so that passes hold like with like; otherwise as they come.
        """
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).train()
        self._micro_batch = micro_batch
        self._by_length = by_length
        self._masters = [weight.detach().float() for weight in self.model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.0, fused=fused)

    def step(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """One optimizer step, PPO-clip, mean over the step's response tokens; returns loss and gradient norm."""
        if self._by_length:
            samples = sorted(samples, key=lambda sample: len(sample.prompt_ids) + len(sample.token_ids))
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        total = 0.0
        for start in range(0, len(samples), self._micro_batch):
            loss = self._loss_sum(samples[start : start + self._micro_batch]) / num_tokens
            loss.backward()
            total += float(loss)
        weights = list(self.model.parameters())
        for master, weight in zip(self._masters, weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, MAX_GRAD_NORM)
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._masters, weights, strict=True):
                weight.copy_(master)
        return total, float(norm)

    def logprobs(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of every token but the first, padded [N, L - 1], and which of them are response tokens."""
        rows = [sample.prompt_ids + sample.token_ids for sample in samples]
        length = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        mask, response = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
            response[i, len(sample.prompt_ids) : len(row)] = True
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2), response[:, 1:]

    def _loss_sum(self, samples: Sequence[Sample]) -> torch.Tensor:
        logprobs, response = self.logprobs(samples)
        behaviour = torch.zeros_like(logprobs)
        behaviour[response] = torch.tensor([value for sample in samples for value in sample.logprobs])
        advantages = torch.tensor([sample.advantage for sample in samples])[:, None]
        ratio = (logprobs - behaviour).clamp(-20, 20).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
        return -(objective * response).sum()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every weight by name; a tied head by its own name too, or vLLM would keep its old one."""
        named = list(self.model.named_parameters())
        if self.model.config.tie_word_embeddings:
            named.append(("lm_head.weight", self.model.get_output_embeddings().weight))
        return [(name, weight.detach()) for name, weight in named]
