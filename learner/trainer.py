"""The real trainer behind `LearnerStream`: a backend, a publisher and checkpoints, all in one compute thread.

Invariants: torch runs in that thread only, so the loop's thread answers the engine meanwhile; segments are removed
when the trainer closes, whatever ended it; a checkpoint is loaded before anything else sees the weights; a step whose
groups have no response token leaves weights, optimizer and warm-up as they are.
"""

import asyncio
import logging
import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from configs.model_folder import ModelError, is_hub_name
from configs.root import Config
from engine.core.errors import first_line
from engine.wire import Canary, Int32s, Manifest, Milestone, TrainGroup
from learner.backends.base import Backend
from learner.backends.torch import TorchBackend
from learner.checkpoint import save_checkpoint
from learner.loading import load_policy, load_reference
from learner.milestone import Loaded
from learner.placement import Placement, rank_threads, tell_launcher
from learner.policy import Policy
from learner.publish import SegmentPublisher
from learner.ranked import RankedBackend, lead, take_device
from learner.resume import CheckpointFolder, check_fits
from learner.update import PolicyUpdate

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
CHECKED_SEQUENCES = 2
"""Canaries that the check of the packed forward pass computes: what is wrong shows at each, and it is in float32."""


class TorchTrainer:
    """Trains `config.model` and keeps checkpoints under `run_folder`; close it when done."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        placement: Placement = Placement(),  # noqa: B008  (frozen)
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is loaded before `open`.

        Args:
            config: The run's.
            run_folder: Its `checkpoints` are kept here.
            placement: Rank 0's place; the only rank by default.
            on_failure: Called from another thread when another rank fails; `failure` then says which and how.
        """
        self._config = config
        self._placement, self._on_failure = placement, on_failure
        self._ranked: RankedBackend | None = None
        self._checkpoints = CheckpointFolder(run_folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._publisher = SegmentPublisher()
        self._policy_version = 0

    def __enter__(self) -> "TorchTrainer":
        """Remove segments of learners that were killed."""
        self._publisher.__enter__()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Remove the segments, wait for the pass that runs, end the other ranks."""
        self._publisher.unlink()
        closing = None
        try:
            if self._ranked is not None and error is not None:
                # First, for the pass that runs may wait for them.
                self._ranked.abandon(f"{type(error).__name__} {error}".strip())
            elif self._ranked is not None:
                closing = self._thread.submit(self._ranked.close)
            self._thread.shutdown(wait=True, cancel_futures=closing is None)
            if closing is not None:
                closing.result()
        finally:
            self._publisher.__exit__()
            self._checkpoints.close()

    @property
    def failure(self) -> str:
        """Which other rank failed and how; empty while all is well."""
        return self._ranked.failure if self._ranked is not None else ""

    async def open(self) -> Loaded | None:
        """Load model, tokenizer and checkpoint, and check that packing computes what the model does.

        Raises:
            DeadlineError: another learner has the checkpoints' folder.
        """
        learner = self._config.learner
        deadline_s = learner.idle_deadline_s
        if self._placement.world_size > 1:
            # The other ranks wait for this one meanwhile; ours is the better text.
            deadline_s = min(deadline_s, learner.rank_deadline_s / 2)
        await self._checkpoints.open(deadline_s)
        return await self._run(self._open)

    async def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Add the gradient of `groups`."""
        await self._run(lambda: self._update.add(groups))

    async def step(self) -> dict[str, float]:
        """Take the optimizer step; a step without a response token changes nothing."""
        return await self._run(self._step)

    async def lay_out(self, policy_version: int) -> Manifest:
        """Weights into shared memory, with the canaries' logprobs."""
        return await self._run(lambda: self._lay_out(policy_version))

    async def save(self, milestone: Milestone) -> str:
        """Write a checkpoint."""
        return await self._run(lambda: self._save(milestone))

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self) -> Loaded | None:
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(rank_threads(self._config.learner, self._placement))
        torch.manual_seed(self._config.run.seed)
        take_device(self._config.learner, self._placement)
        self._tokenizer = load_tokenizer(self._config.model.path)
        self._canaries = canary_sequences(self._tokenizer, self._config.weights.canary_prompts)
        policy = load_policy(self._config, sequences=self._canaries[:CHECKED_SEQUENCES])
        self._backend = self._make_backend(policy)
        loaded = self._load_checkpoint()
        self._update = PolicyUpdate(self._backend, self._config)
        return loaded

    def _load_checkpoint(self) -> Loaded | None:
        """What `run.resume` means, in place of the weights of `model.path`."""
        found = self._checkpoints.find(self._config)
        if found is None:
            return None if self._config.run.resume == "no" else Loaded()
        path, record = found
        check_fits(path, record.fingerprint, self._backend.fingerprint())
        self._backend.load_states(path)
        logger.info("went on from %s, version %d", path, record.milestone.policy_version)
        return Loaded(str(path), record.milestone)

    def _make_backend(self, policy: Policy) -> Backend:
        reference = load_reference(self._config, policy, self._canaries[:CHECKED_SEQUENCES])
        if self._config.learner.backend == "torch":
            return TorchBackend(policy, self._config, reference)
        self._ranked = lead(policy, reference, self._config, self._placement, self._on_failure, self._end_process)
        return self._ranked

    def _end_process(self, code: int) -> None:
        """At once, for the compute thread waits for a rank that will not answer."""
        self._publisher.unlink()
        if self.failure:
            tell_launcher(self.failure, os.environ)
        os._exit(code)

    def _step(self) -> dict[str, float]:
        metrics = self._update.take(self._policy_version)
        return metrics | {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}

    def _lay_out(self, policy_version: int) -> Manifest:
        self._policy_version = policy_version  # the next gradient starts from what is laid out now
        logprobs = self._backend.sequence_logprobs(self._canaries)
        canaries = [Canary(tokens, values) for tokens, values in zip(self._canaries, logprobs, strict=True)]
        return self._publisher.lay_out(policy_version, self._backend.weights(), canaries)

    def _save(self, milestone: Milestone) -> str:
        fingerprint = self._backend.fingerprint()

        def write(folder: Path) -> None:
            self._backend.save_model(folder)
            self._tokenizer.save_pretrained(folder)
            self._backend.save_states(folder)

        folder = self._checkpoints.path
        return str(save_checkpoint(folder, milestone, fingerprint, self._config.checkpoint, write))


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `path` (a folder, or a hub name).

    Raises:
        ModelError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=not is_hub_name(path))
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"model.path {path} must hold a tokenizer: {first_line(exc)}") from exc


def canary_sequences(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Int32s]:
    """`count` fixed sequences of at most CANARY_TOKENS tokens; texts are numbered where there are too few."""
    sequences: list[Int32s] = []
    for number in range(count):
        lap, text = number // len(CANARY_TEXTS), CANARY_TEXTS[number % len(CANARY_TEXTS)]
        ids = tokenizer(f"{lap + 1}. {text}" if lap else text, add_special_tokens=False)["input_ids"]
        sequences.append(np.asarray(ids[:CANARY_TOKENS], dtype=np.int32))
    return sequences
