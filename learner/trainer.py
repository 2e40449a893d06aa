"""The real trainer behind `LearnerStream`: a backend, a publisher and checkpoints, all in one compute thread.

Invariants: torch runs in that thread only, so the loop's thread answers the engine meanwhile; segments are removed
when the trainer closes, whatever ended it; a step whose groups have no response token leaves weights, optimizer and
warm-up as they are.
"""

import asyncio
import logging
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from configs.model_folder import ModelError, is_hub_name
from configs.root import Config
from engine.wire import Canary, Int32s, Manifest, TrainGroup
from learner.backends.torch import TorchBackend
from learner.checkpoint import save_checkpoint
from learner.losses import TokenSums
from learner.policy import load_policy
from learner.publish import SegmentPublisher

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CANARY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog, being lazy, does not even lift its head to look at it.",
    "What is 37 plus 45? First add the tens: 30 plus 40 is 70. Then the ones: 7 plus 5 is 12. Together that makes 82.",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain it boils at a lower temperature because",
    "def area(width, height):\n    return width * height\n\nprint(area(3, 4))  # prints 12, the area of the rectangle",
    "A train leaves at 9:15 and arrives at 11:40. The journey takes two hours and twenty-five minutes, so",
    "Once upon a time there was a king who had three sons. The eldest was strong, the second was clever, and the",
)
CANARY_TOKENS = 32
"""Tokens of a canary; short enough for every context, long enough to see every layer."""


class TorchTrainer:
    """Trains `config.model` and keeps checkpoints under `run_folder`; close it when done."""

    def __init__(self, config: Config, run_folder: Path) -> None:
        self._config = config
        self._folder = run_folder / "checkpoints"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._publisher = SegmentPublisher()
        self._sums, self._packed_tokens = TokenSums(), 0

    def __enter__(self) -> "TorchTrainer":
        """Remove segments of learners that were killed."""
        self._publisher.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the pass that runs, remove the segments."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._publisher.__exit__()

    async def open(self) -> None:
        """Load model and tokenizer, and check that packing computes what the model does."""
        await self._run(self._open)

    async def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add the gradient of `groups`."""
        await self._run(lambda: self._accumulate(groups))

    async def step(self) -> dict[str, float]:
        """Take the optimizer step; a step without a response token changes nothing."""
        return await self._run(self._step)

    async def lay_out(self, policy_version: int) -> Manifest:
        """Weights into shared memory, with the canaries' logprobs."""
        return await self._run(lambda: self._lay_out(policy_version))

    async def save(self, policy_version: int) -> str:
        """Write a checkpoint."""
        return await self._run(lambda: self._save(policy_version))

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> None:
        transformers_logging.disable_progress_bar()
        if self._config.learner.threads:
            torch.set_num_threads(self._config.learner.threads)
        torch.manual_seed(self._config.run.seed)
        path = self._config.model.path
        policy = load_policy(path, self._config.learner.logprob_chunk_tokens, lora=self._config.lora)
        self._tokenizer = load_tokenizer(path)
        self._backend = TorchBackend(policy, self._config, "cuda" if torch.cuda.is_available() else "cpu")
        self._canaries = canary_sequences(self._tokenizer, self._config.weights.canary_prompts)
        difference = policy.check_forward(self._canaries)
        logger.info("model %s loaded, packed forward pass within %.3f nats of its own", path, difference)

    def _accumulate(self, groups: Sequence[TrainGroup]) -> None:
        sums, packed_tokens = self._backend.accumulate(groups)
        self._sums += sums
        self._packed_tokens += packed_tokens

    def _step(self) -> dict[str, float]:
        sums, packed_tokens = self._sums, self._packed_tokens
        self._sums, self._packed_tokens = TokenSums(), 0
        memory = {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
        if not sums.tokens:
            # Adam moves weights on a zero gradient too (momentum, decay). Nothing was measured, so no means are sent.
            return {"tokens_trained": 0.0, "tokens_packed": 0.0, "skipped": 1.0} | memory
        report = self._backend.optimizer_step(sums.tokens)
        return (
            sums.means()
            | memory
            | {
                "tokens_packed": float(packed_tokens),
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "skipped": float(report.is_skipped),
            }
        )

    def _lay_out(self, policy_version: int) -> Manifest:
        logprobs = self._backend.sequence_logprobs(self._canaries)
        canaries = [Canary(tokens, values) for tokens, values in zip(self._canaries, logprobs, strict=True)]
        return self._publisher.lay_out(policy_version, self._backend.weights(), canaries)

    def _save(self, policy_version: int) -> str:
        def write(folder: Path) -> None:
            self._backend.save_model(folder)
            self._tokenizer.save_pretrained(folder)

        return str(save_checkpoint(self._folder, policy_version, self._config.checkpoint.keep, write))


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `path` (a folder, or a hub name).

    Raises:
        ModelError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=not is_hub_name(path))
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"model.path {path} must hold a tokenizer: {exc}") from exc


def canary_sequences(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Int32s]:
    """`count` fixed sequences of at most CANARY_TOKENS tokens; texts are numbered where there are too few."""
    sequences: list[Int32s] = []
    for number in range(count):
        lap, text = number // len(CANARY_TEXTS), CANARY_TEXTS[number % len(CANARY_TEXTS)]
        ids = tokenizer(f"{lap + 1}. {text}" if lap else text, add_special_tokens=False)["input_ids"]
        sequences.append(np.asarray(ids[:CANARY_TOKENS], dtype=np.int32))
    return sequences
