"""One backend made of many ranks: rank 0 gives every call to all of them, the others follow.

Invariants: the ranks load the same model, so nothing but groups and token ids goes out to them; sums come back in the
order of ranks, so a report does not depend on which one was faster; a call that fails on any rank ends all.

`lead` is called by `learner.trainer` on rank 0, `follow` by `learner.train` on every other rank.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  (public, not in __all__)
from transformers.utils import logging as transformers_logging

from configs.load import ConfigError
from configs.root import Config
from engine.wire import Float32s, Int32s, TrainGroup
from learner.backends.base import StepReport
from learner.losses import TokenSums
from learner.packing import fill_micro_batches, split_groups
from learner.placement import Placement
from learner.policy import Policy, load_policy
from learner.ranks import Follower, Leader, Meeting, find_leader, gather_followers, open_meeting
from learner.shards import check_world, load_rank, save_rank
from learner.sharing import share_out

if TYPE_CHECKING:
    from learner.backends.deepspeed import DeepSpeedBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradient of this rank's groups."""

    groups: list[TrainGroup]
    num_passes: int

    def run(self, target: "DeepSpeedBackend") -> tuple[TokenSums, int]:
        """Sums over these groups' tokens, packed tokens."""
        return target.accumulate(self.groups, self.num_passes)


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Take the optimizer step."""

    num_response_tokens: int

    def run(self, target: "DeepSpeedBackend") -> StepReport:
        """The same report on every rank."""
        return target.optimizer_step(self.num_response_tokens)


@dataclass(frozen=True, slots=True)
class Gather:
    """Bring the weights together on the rank that keeps them."""

    keeps: bool

    def run(self, target: "DeepSpeedBackend") -> list[tuple[str, Tensor]]:
        """Names and weights; none from the ranks that do not keep them."""
        return target.weights(keeps=self.keeps)


@dataclass(frozen=True, slots=True)
class ComputeLogprobs:
    """Logprobs of fixed sequences."""

    sequences: list[Int32s]

    def run(self, target: "DeepSpeedBackend") -> list[Float32s]:
        """The same on every rank."""
        return target.sequence_logprobs(self.sequences)


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write this rank's state into a checkpoint."""

    folder: Path

    def run(self, target: "DeepSpeedBackend") -> None:
        """Write it; the folder is on a disk that all ranks share."""
        save_rank(self.folder, dist.get_rank(), dist.get_world_size(), target.state())


@dataclass(frozen=True, slots=True)
class LoadState:
    """Take over this rank's state from a checkpoint."""

    folder: Path

    def run(self, target: "DeepSpeedBackend") -> None:
        """Load it.

        Raises:
            DataError: it does not fit.
        """
        target.load_state(load_rank(self.folder, dist.get_rank(), dist.get_world_size(), target.state()))


@dataclass(frozen=True, slots=True)
class Close:
    """The last command."""

    def run(self, target: "DeepSpeedBackend") -> None:
        """Leave the process group."""
        target.close()
        dist.destroy_process_group()


class RankedBackend:
    """All ranks as one `Backend`, in rank 0's process."""

    def __init__(self, leader: Leader, own: "DeepSpeedBackend", config: Config, num_ranks: int) -> None:
        self._leader = leader
        self._own = own
        self._config = config
        self._num_ranks = num_ranks

    @property
    def failure(self) -> str:
        """Which rank failed and how; empty while all is well."""
        return self._leader.failure

    def accumulate(self, groups: Sequence[TrainGroup]) -> tuple[TokenSums, int]:
        """Add the gradient of `groups`; the sums over their tokens and how many packed tokens were computed."""
        shares = share_out(groups, self._num_ranks)
        budget = self._config.learner.micro_batch_tokens
        num_passes = max(len(fill_micro_batches(split_groups(share), budget)) for share in shares)
        outcomes = self._leader.everywhere([Accumulate(share, num_passes) for share in shares], self._own)
        sums = TokenSums()
        for part, _ in outcomes:
            sums += part
        return sums, sum(packed_tokens for _, packed_tokens in outcomes)

    def optimizer_step(self, num_response_tokens: int) -> StepReport:
        """Divide the gradient by `num_response_tokens`, clip it, step, and clear it."""
        return self._leader.everywhere([TakeStep(num_response_tokens)] * self._num_ranks, self._own)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its HF name as it is now; a tied head too, as the same tensor."""
        return iter(self._gather())

    def sequence_logprobs(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence [T]: [T - 1], nats."""
        return self._leader.everywhere([ComputeLogprobs(list(sequences))] * self._num_ranks, self._own)[0]

    def save_model(self, folder: Path) -> None:
        """Write weights, configuration and generation configuration in HF format."""
        self._own.policy.save_model(folder, self._gather())

    def save_state(self, folder: Path) -> None:
        """Write every rank's state into `folder`, which all ranks see."""
        self._leader.everywhere([SaveState(folder.absolute())] * self._num_ranks, self._own)

    def load_state(self, folder: Path) -> None:
        """Take over every rank's state from `folder`, weights included.

        Raises:
            DataError: it was saved by another number of ranks, with another stage, or for another model.
        """
        check_world(folder, self._num_ranks)  # said here, this is an error of one process
        self._leader.everywhere([LoadState(folder.absolute())] * self._num_ranks, self._own)

    def close(self, cause: str = "") -> None:
        """End all other ranks: after their last command, or at once because rank 0 ends with `cause`."""
        if cause:
            self._leader.abandon(cause)
            return
        self._leader.close([Close()] * self._num_ranks, self._own)

    def _gather(self) -> list[tuple[str, Tensor]]:
        commands = [Gather(keeps=rank == 0) for rank in range(self._num_ranks)]
        return self._leader.everywhere(commands, self._own)[0]


def rank_device(placement: Placement) -> torch.device:
    """Where this rank computes.

    Raises:
        ConfigError: this machine has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if placement.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"learner.ranks on one machine must be at most its GPUs, {torch.cuda.device_count()}, "
            f"got {placement.local_world_size}"
        )
    return torch.device("cuda", placement.local_rank)


def lead(policy: Policy, config: Config, placement: Placement, on_failure: Callable[[], None]) -> RankedBackend:
    """Meet the other ranks and split `policy` over them; rank 0.

    Args:
        policy: On this rank's device, and checked.
        config: The run's.
        placement: Of this process.
        on_failure: Called from another thread when a rank fails.

    Raises:
        DeadlineError: the other ranks did not come.
        RankLost: one of them failed.
    """
    make_backend = backend_type()
    deadline_s = config.learner.rank_deadline_s
    join(config, placement)
    host = "127.0.0.1" if placement.is_local else os.environ["MASTER_ADDR"]
    listener, meeting = open_meeting(host)
    _agree(meeting, placement)
    followers = gather_followers(listener, meeting, placement.world_size - 1, deadline_s)
    leader = Leader(followers, deadline_s, on_failure)
    try:
        own = make_backend(policy, config)
    except Exception as exc:
        raise leader.blame(exc) from exc
    return RankedBackend(leader, own, config, placement.world_size)


def follow(config: Config, placement: Placement, dtype: torch.dtype = torch.bfloat16) -> None:
    """Do what rank 0 says until it says stop; every other rank.

    Args:
        config: The run's.
        placement: Of this process.
        dtype: Of the weights, as on rank 0.

    Raises:
        RankLost: another rank failed.
        ModelError: `model.path` cannot be used here.
    """
    make_backend = backend_type()
    join(config, placement)
    meeting = _agree(None, placement)
    follower = Follower(find_leader(placement.rank, meeting, config.learner.rank_deadline_s), Close)
    transformers_logging.disable_progress_bar()
    try:
        torch.manual_seed(config.run.seed)
        policy = load_policy(config.model.path, config.learner.logprob_chunk_tokens, dtype)
        backend = make_backend(policy.to(rank_device(placement)), config)
    except Exception as exc:
        raise follower.blame(exc) from exc
    logger.info("rank %s of %s follows rank 0", placement.rank, placement.world_size)
    follower.follow(backend)


def backend_type() -> "type[DeepSpeedBackend]":
    """The sharded backend; its library is loaded here.

    Raises:
        ConfigError: the library is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed reads it at import; without a launcher this is the only rank.
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        from learner.backends.deepspeed import DeepSpeedBackend
    except ImportError as exc:
        raise ConfigError(
            'learner.backend = "deepspeed" needs that package: pip install "adastream[deepspeed]"'
        ) from exc
    return DeepSpeedBackend


def join(config: Config, placement: Placement) -> None:
    """Make the process group of all ranks; collective."""
    device = rank_device(placement)
    name, timeout = "gloo", timedelta(seconds=config.learner.rank_deadline_s)
    if device.type == "cuda":
        name = "nccl"
        torch.cuda.set_device(device)
    if placement.world_size == 1:
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(name, timeout=timeout)


def _agree(meeting: Meeting | None, placement: Placement) -> Meeting:
    """Rank 0's meeting, on every rank."""
    if placement.world_size > 1:
        box = [meeting]
        dist.broadcast_object_list(box, src=0, device=rank_device(placement))
        meeting = box[0]
    assert meeting is not None
    return meeting
