"""The ranks' states in a checkpoint: written and read one a rank, checked, and put together to whole weights.

`state/rank-R-of-W.safetensors` holds what `state` of the backend gives. Its `master` is flat:
- torch (stage 0, one rank): all weights in the order of the model's parameters, end to end;
- stages 1 and 2: all weights in the order of the model's parameters, end to end, zeros up to a multiple of W, cut into
  W equal pieces;
- stage 3: each weight by itself with zeros up to a multiple of W, cut into W equal pieces; a rank has its piece of
  each, in the order of the parameters.

Invariants: states load only where as many ranks with the same stage read them; merging is exact, float32 to float32.
No deepspeed here, so an export needs none.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.core.errors import DataError
from learner.checkpoint import state_file
from learner.state import cuda_random_state, random_state, read_state, set_random_state, write_state

STAGE = "zero_stage"
"""Name of the tensor that says how the others are cut."""
_NAME = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


def save_rank(folder: Path, rank: int, world_size: int, state: dict[str, Tensor]) -> None:
    """Write a rank's state, with that of its generators of random numbers."""
    write_state(folder / state_file(rank, world_size), state | random_state() | cuda_random_state())


def load_rank(folder: Path, rank: int, world_size: int, now: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a rank's state and take over its generators of random numbers.

    Args:
        folder: A checkpoint.
        rank: This rank.
        world_size: Ranks of this run.
        now: The state as it is.

    Raises:
        DataError: it was saved by another number of ranks, with another stage, or for another model.
    """
    check_world(folder, world_size)
    path = folder / state_file(rank, world_size)
    state = read_state(path, now | random_state())
    if STAGE in now and not torch.equal(state[STAGE], now[STAGE]):
        raise DataError(
            f"{path}: learner.zero_stage must be {state[STAGE].item()} as when it was saved, got {now[STAGE].item()}"
        )
    set_random_state(state)
    return state


def check_world(folder: Path, world_size: int) -> None:
    """Whether `world_size` ranks can load the states of a checkpoint.

    Raises:
        DataError: they cannot.
    """
    saved = saved_ranks(folder)
    if saved != world_size:
        raise DataError(
            f"checkpoint {folder} was saved by {saved} ranks and can only be resumed by as many: learner.ranks must be "
            f"{saved}, got {world_size} (or start from its weights alone: model.path = {folder})"
        )


def saved_ranks(folder: Path) -> int:
    """How many ranks saved their states in a checkpoint.

    Raises:
        DataError: none did, or some are missing.
    """
    found = [match for path in folder.glob("state/rank-*") if (match := _NAME.fullmatch(path.name))]
    if not found:
        raise DataError(f"checkpoint {folder} must hold the states of its ranks ({state_file(0, 1)}, ...), has none")
    world_size = int(found[0][2])
    missing = [state_file(rank, world_size) for rank in range(world_size)]
    missing = [name for name in missing if not (folder / name).is_file()]
    if missing:
        raise DataError(f"checkpoint {folder}: {', '.join(missing)} must be there, missing")
    return world_size


def read_masters(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The whole float32 master weights of a checkpoint.

    Args:
        folder: A checkpoint.
        shapes: Of all parameters, in the model's order.

    Raises:
        DataError: it holds no such states, or they do not fit the shapes.
    """
    stages: set[int] = set()
    shards: list[Tensor] = []
    world_size = saved_ranks(folder)
    for rank in range(world_size):
        path = folder / state_file(rank, world_size)
        try:
            state = load_file(path)
            shards.append(state["master"])
            stages.add(int(state[STAGE].item()) if STAGE in state else 0)
        except (OSError, SafetensorError, KeyError) as exc:
            raise DataError(f"{path} must hold the state of a rank: {exc}") from exc
    if len(stages) != 1:
        raise DataError(f"checkpoint {folder}: the states must be of one ZeRO stage, are of {sorted(stages)}")
    try:
        return merge_shards(shards, shapes, stages.pop())
    except ValueError as exc:
        raise DataError(f"checkpoint {folder}: {exc}") from exc


def merge_shards(shards: Sequence[Tensor], shapes: Mapping[str, torch.Size], stage: int) -> dict[str, Tensor]:
    """Whole weights from flat shards in the order of ranks; `stage` as in the module's text.

    Raises:
        ValueError: the shards are too short or too long for `shapes`.
    """
    world_size = len(shards)
    per_weight = [-(-shape.numel() // world_size) for shape in shapes.values()]
    total = sum(shape.numel() for shape in shapes.values())
    whole_N = torch.cat(list(shards))
    # Stages 1 and 2 pad the end only, at most by DeepSpeed's alignment (two elements a rank).
    fits = len(whole_N) == world_size * sum(per_weight) if stage == 3 else 0 <= len(whole_N) - total <= 2 * world_size
    if not fits or len({shard.numel() for shard in shards}) != 1:
        lengths = [shard.numel() for shard in shards]
        kind = f"shards of ZeRO-{stage}" if stage else "the state of one rank"
        raise ValueError(f"{kind} must hold {total} weights and padding, got lengths {lengths}")
    weights: dict[str, Tensor] = {}
    start = 0
    for (name, shape), size in zip(shapes.items(), per_weight, strict=True):
        if stage == 3:
            flat = torch.cat([shard[start : start + size] for shard in shards])[: shape.numel()]
            start += size
        else:
            flat = whole_N[start : start + shape.numel()]
            start += shape.numel()
        weights[name] = flat.reshape(shape)
    return weights
