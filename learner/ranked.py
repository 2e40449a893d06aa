"""One backend made of many ranks: rank 0 gives every call to all of them, the others follow.

Invariants: the ranks load the same model, so nothing but groups and token ids goes out to them; sums come back in the
order of ranks, so a report does not depend on which one was faster; a call that fails on any rank ends all.

`lead` is called by `learner.trainer` on rank 0, `follow` by `learner.train` on every other rank.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from configs.training import Learner
from engine.core.errors import RunError, first_line
from engine.wire import Fingerprint, Float32s, Int32s, TrainGroup
from learner.backends.base import StepReport
from learner.gradient import Gradient, SampleKey, micro_batches
from learner.loading import choose_device, load_policy, load_reference
from learner.meeting import Meeting, find_leader, gather_followers, open_meeting
from learner.placement import Placement
from learner.policy import Policy
from learner.ranks import Follower, Leader
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
    proximal: dict[SampleKey, Float32s] | None

    def run(self, target: "DeepSpeedBackend") -> Gradient:
        """What this rank added."""
        return target.accumulate(self.groups, self.num_passes, self.proximal)


@dataclass(frozen=True, slots=True)
class ComputeResponses:
    """Logprobs of the responses in this rank's groups."""

    groups: list[TrainGroup]
    num_passes: int

    def run(self, target: "DeepSpeedBackend") -> dict[SampleKey, Float32s]:
        """By sample."""
        return target.response_logprobs(self.groups, self.num_passes)


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Take the optimizer step."""

    normaliser: float

    def run(self, target: "DeepSpeedBackend") -> StepReport:
        """The same report on every rank."""
        return target.optimizer_step(self.normaliser)


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

    @property
    def vocabulary_size(self) -> int:
        """V: token ids are below it."""
        return self._own.policy.vocabulary_size

    def accumulate(
        self, groups: Sequence[TrainGroup], proximal: Mapping[SampleKey, Float32s] | None = None
    ) -> Gradient:
        """Add the gradient of `groups`; `proximal` = logprobs of the proximal policy, None = the policy as it is."""
        shares, num_passes = self._share_out(groups)
        commands = [Accumulate(share, num_passes, _only(proximal, share)) for share in shares]
        gradient = Gradient()
        for part in self._leader.everywhere(commands, self._own):
            gradient += part
        return gradient

    def response_logprobs(self, groups: Sequence[TrainGroup]) -> dict[SampleKey, Float32s]:
        """Logprobs of every response token under the policy as it is, at the sampling temperature, nats."""
        shares, num_passes = self._share_out(groups)
        logprobs: dict[SampleKey, Float32s] = {}
        for part in self._leader.everywhere([ComputeResponses(share, num_passes) for share in shares], self._own):
            logprobs |= part
        return logprobs

    def _share_out(self, groups: Sequence[TrainGroup]) -> tuple[list[list[TrainGroup]], int]:
        """Each rank's groups, and the passes of the rank that needs most."""
        shares = share_out(groups, self._num_ranks)
        return shares, max(len(micro_batches(share, self._config.learner)) for share in shares)

    def optimizer_step(self, normaliser: float) -> StepReport:
        """Divide the gradient by `normaliser`, clip it, step, and clear it."""
        return self._leader.everywhere([TakeStep(normaliser)] * self._num_ranks, self._own)[0]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its HF name as it is now; a tied head too, as the same tensor."""
        return iter(self._gather())

    def sequence_logprobs(self, sequences: Sequence[Int32s]) -> list[Float32s]:
        """Logprob of token t + 1 given tokens 0..t at temperature 1, for each sequence [T]: [T - 1], nats."""
        return self._leader.everywhere([ComputeLogprobs(list(sequences))] * self._num_ranks, self._own)[0]

    def save_model(self, folder: Path) -> None:
        """Write weights, configuration and generation configuration in HF format."""
        self._own.policy.save_model(folder, self._gather())

    def fingerprint(self) -> Fingerprint:
        """What must be the same before `load_states` makes sense."""
        return self._own.fingerprint()

    def save_states(self, folder: Path) -> None:
        """Write every rank's state into `folder`, which all ranks see."""
        self._leader.everywhere([SaveState(folder.absolute())] * self._num_ranks, self._own)

    def load_states(self, folder: Path) -> None:
        """Take over every rank's state from `folder`, weights included.

        Raises:
            DataError: it was saved by another number of ranks, with another stage, or for another model.
        """
        check_world(folder, self._num_ranks)  # said here, this is an error of one process
        self._leader.everywhere([LoadState(folder.absolute())] * self._num_ranks, self._own)

    def close(self) -> None:
        """End all other ranks after their last command."""
        self._leader.close([Close()] * self._num_ranks, self._own)

    def abandon(self, cause: str) -> None:
        """End all other ranks at once because rank 0 ends with `cause`; from any thread."""
        self._leader.abandon(cause)

    def _gather(self) -> list[tuple[str, Tensor]]:
        commands = [Gather(keeps=rank == 0) for rank in range(self._num_ranks)]
        return self._leader.everywhere(commands, self._own)[0]


def take_device(config: Learner, placement: Placement) -> torch.device:
    """Where this rank computes; a GPU of its own becomes torch's current one.

    Raises:
        ConfigError: `learner.device` is not here, or this machine has fewer GPUs than ranks.
    """
    device = choose_device(config)
    if device.type != "cuda":
        return device
    if placement.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"learner.ranks on one machine must be at most its GPUs, {torch.cuda.device_count()}, "
            f"got {placement.local_world_size}"
        )
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def lead(
    policy: Policy,
    reference: Policy | None,
    config: Config,
    placement: Placement,
    on_failure: Callable[[], None],
    end_process: Callable[[int], None],
) -> RankedBackend:
    """Meet the other ranks and split `policy` over them; rank 0.

    Args:
        policy: On this rank's device, and checked.
        reference: Frozen, for a KL penalty; stays whole.
        config: The run's.
        placement: Of this process.
        on_failure: Called from another thread when a rank fails.
        end_process: Called with an exit code when rank 0 is stuck after a failure.

    Raises:
        DeadlineError: the other ranks did not come.
        RankLost: one of them failed.
    """
    make_backend = backend_type()
    deadline_s = config.learner.rank_deadline_s
    join(config, placement)
    host = "127.0.0.1" if placement.is_local else os.environ["MASTER_ADDR"]
    listener, meeting = open_meeting(host)
    _agree(meeting, config, placement)
    followers = gather_followers(listener, meeting, placement.world_size - 1, deadline_s)
    leader = Leader(followers, deadline_s, on_failure, end_process)
    try:
        own = make_backend(policy, config, reference)
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
    meeting = _agree(None, config, placement)
    follower = Follower(find_leader(placement.rank, meeting, config.learner.rank_deadline_s), Close)
    transformers_logging.disable_progress_bar()
    try:
        torch.manual_seed(config.run.seed)
        policy = load_policy(config, dtype)  # the model that rank 0 has checked
        backend = make_backend(policy, config, load_reference(config, policy))
    except Exception as exc:
        raise follower.blame(exc) from exc
    logger.info("rank %s of %s follows rank 0", placement.rank, placement.world_size)
    follower.follow(backend)


def _only(
    proximal: Mapping[SampleKey, Float32s] | None, groups: Sequence[TrainGroup]
) -> dict[SampleKey, Float32s] | None:
    """The logprobs of these groups' samples."""
    if proximal is None:
        return None
    keys = [(group.group_id, sample.index) for group in groups for sample in group.samples]
    return {key: proximal[key] for key in keys if key in proximal}


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
            f'learner.backend = "deepspeed" needs that package (pip install "adastream[deepspeed]"): {first_line(exc)}'
        ) from exc
    return DeepSpeedBackend


def join(config: Config, placement: Placement) -> None:
    """Make the process group of all ranks; collective.

    Raises:
        RunError: they cannot reach each other.
    """
    device = take_device(config.learner, placement)
    name, timeout = "gloo", timedelta(seconds=config.learner.rank_deadline_s)
    if device.type == "cuda":
        name = "nccl"
    if placement.world_size == 1:
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        dist.init_process_group(name, timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as exc:
        raise RunError(
            f"the ranks cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {first_line(exc)} (the "
            "launcher's --master_port, torchrun's --master-port, names another port)"
        ) from exc


def _agree(meeting: Meeting | None, config: Config, placement: Placement) -> Meeting:
    """Rank 0's meeting, on every rank."""
    if placement.world_size > 1:
        box = [meeting]
        dist.broadcast_object_list(box, src=0, device=take_device(config.learner, placement))
        meeting = box[0]
    if meeting is None:
        raise RunError("rank 0 must say where the ranks meet, said nothing")
    return meeting
