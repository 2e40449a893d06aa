"""Which rank this process is, from the environment that torchrun and the deepspeed launcher set.

Invariants: without a launcher a process is the only rank; a launcher that starts other than `learner.ranks` processes
is an error, so a run's configuration says how it was trained; a rank ends with its launcher, however that ends.

No torch here: it is read before torch is imported.
"""

import ctypes
import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError
from configs.training import Learner

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
"""prctl(2)."""
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")
"""Of torchrun, of the deepspeed launcher."""


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
        ConfigError: the launcher started another number of ranks than the configuration says, or one of the variables
            is missing or no number.
    """
    placement = Placement()
    if "RANK" in environ:
        world_size = _number(environ, "WORLD_SIZE")
        local_world_size = next((_number(environ, name) for name in _LOCAL_SIZES if environ.get(name)), world_size)
        placement = Placement(_number(environ, "RANK"), world_size, _number(environ, "LOCAL_RANK"), local_world_size)
    if placement.world_size != config.ranks:
        raise ConfigError(
            f"learner.ranks must be the number of processes that the launcher started, {placement.world_size}, "
            f"got {config.ranks}"
        )
    return placement


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"{name} in the environment must be a number where RANK is set, got {environ.get(name)!r}; a launcher sets "
            "both, without one neither is needed"
        ) from None


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
    if not path:
        return
    try:
        Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8")
    except OSError as exc:
        logger.warning("the launcher will not hear why this rank ended: %s", exc)
