"""The training state as named tensors: what AdamW and the generators of random numbers hold, on disk and back.

Invariants: a state loads bit for bit or not at all; nothing is pickled. The state of a parameter that AdamW has not
stepped yet is zeros, which is what its first step starts from.

Shapes: N weights of a rank.
"""

import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.core.errors import DataError

_RANDOM = "random."
_PYTHON_FORMAT = 3
"""First element of `random.getstate()` since Python 2.7."""


def adamw_state(optimizer: torch.optim.AdamW, master_N: nn.Parameter) -> dict[str, Tensor]:
    """Master weights [N] float32, both moments [N] float32, and AdamW's own count of steps; not copied."""
    state = optimizer.state.get(master_N, {})
    zeros_N = torch.zeros_like(master_N.detach()) if not state else None
    return {
        "master": master_N.detach(),
        "first_moment": state["exp_avg"] if zeros_N is None else zeros_N,
        "second_moment": state["exp_avg_sq"] if zeros_N is None else zeros_N.clone(),
        "adamw_steps": state["step"] if zeros_N is None else torch.zeros((), dtype=torch.float32),
    }


def load_adamw_state(optimizer: torch.optim.AdamW, master_N: nn.Parameter, state: dict[str, Tensor]) -> None:
    """Take over what `adamw_state` gave, on the device and in the dtype of `master_N`."""
    with torch.no_grad():
        master_N.copy_(state["master"])
    optimizer.state[master_N] = {
        "step": state["adamw_steps"].to(master_N.device),
        "exp_avg": state["first_moment"].to(master_N, copy=True),
        "exp_avg_sq": state["second_moment"].to(master_N, copy=True),
    }


def random_state() -> dict[str, Tensor]:
    """Generators of this process on the CPU: torch's, numpy's and Python's."""
    _, words, place, has_normal, normal = np.random.get_state(legacy=True)
    _, python, python_normal = random.getstate()
    return {
        _RANDOM + "torch": torch.get_rng_state(),
        _RANDOM + "numpy": torch.from_numpy(np.asarray(words, dtype=np.int64)),
        _RANDOM + "numpy_place": torch.tensor([place, has_normal], dtype=torch.int64),
        _RANDOM + "numpy_normal": torch.tensor([normal], dtype=torch.float64),
        _RANDOM + "python": torch.tensor(python, dtype=torch.int64),
        _RANDOM + "python_normal": torch.tensor([python_normal or 0.0, python_normal is not None], dtype=torch.float64),
    }


def cuda_random_state() -> dict[str, Tensor]:
    """Generators of the CUDA devices; empty without one."""
    if not torch.cuda.is_available():
        return {}
    return {f"{_RANDOM}cuda{index}": value for index, value in enumerate(torch.cuda.get_rng_state_all())}


def set_random_state(state: dict[str, Tensor]) -> None:
    """Put back what `random_state` and `cuda_random_state` gave; a device that was not there stays as it is."""
    torch.set_rng_state(state[_RANDOM + "torch"])
    place, has_normal = state[_RANDOM + "numpy_place"].tolist()
    words = state[_RANDOM + "numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, place, has_normal, state[_RANDOM + "numpy_normal"].item()))
    python_normal, has_python_normal = state[_RANDOM + "python_normal"].tolist()
    python = tuple(state[_RANDOM + "python"].tolist())
    random.setstate((_PYTHON_FORMAT, python, python_normal if has_python_normal else None))
    for index, name in enumerate(cuda_random_state()):
        if name in state:
            torch.cuda.set_rng_state(state[name], index)


def write_state(path: Path, state: dict[str, Tensor]) -> None:
    """Write a rank's state; makes its folder."""
    path.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


def read_state(path: Path, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a rank's state.

    Args:
        path: What `write_state` wrote.
        wanted: The state as it is now: names, shapes and dtypes that must be there.

    Raises:
        DataError: it is no state of ours, or a tensor is missing or has another shape or dtype.
    """
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise DataError(f"{path} must hold a training state: {exc}") from exc
    for name, now in wanted.items():
        then = state.get(name)
        if then is None or then.shape != now.shape or then.dtype != now.dtype:
            found = "is missing" if then is None else f"is {list(then.shape)} {then.dtype}"
            raise DataError(f"{path}: {name} must be {list(now.shape)} {now.dtype}, {found}")
    return state
