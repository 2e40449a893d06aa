"""Which rank this process is, from the environment that torchrun and the deepspeed launcher set.

Invariants: without a launcher a process is the only rank; a launcher that starts other than `learner.ranks` processes
is an error, so a run's configuration says how it was trained; a rank ends with its launcher, however that ends.

No torch here: it is read before torch is imported.
"""

import ctypes
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError
from configs.training import Learner

_PR_SET_PDEATHSIG = 1
"""prctl(2)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank among all, and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_local(self) -> bool:
        """All ranks are on this machine."""
        return self.local_world_size == self.world_size


def read_placement(environ: Mapping[str, str], config: Learner) -> Placement:
    """This process's place.

    Args:
        environ: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (deepspeed: LOCAL_SIZE), as a launcher sets them;
            none of them without one.
        config: What the run's configuration says.

    Raises:
        ConfigError: the launcher started another number of ranks than the configuration says.
    """
    placement = Placement()
    if "RANK" in environ:
        world_size, local_rank = int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"])
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world_size)
        placement = Placement(int(environ["RANK"]), world_size, local_rank, local_world_size)
    if placement.world_size != config.ranks:
        raise ConfigError(
            f"learner.ranks must be the number of processes that the launcher started, {placement.world_size}, "
            f"got {config.ranks}"
        )
    return placement


def rank_threads(config: Learner, placement: Placement) -> int:
    """Threads of this rank's linear algebra: more than its share of cores would spin against the other ranks'."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // placement.local_world_size)


def end_with_launcher(placement: Placement) -> None:
    """Ask Linux to end this process when its parent ends: torchrun starts ranks in sessions of their own.

    Rank 0 gets SIGTERM, for it has segments to remove; the others SIGKILL, which also ends what answers nothing else.
    """
    number = signal.SIGKILL if placement.rank else signal.SIGTERM
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def tell_launcher(text: str, environ: Mapping[str, str]) -> None:
    """Leave the cause of this rank's end where torchrun looks for it, so that its report says it."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8")
