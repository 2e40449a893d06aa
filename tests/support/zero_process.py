"""One rank that trains a tiny model with every ZeRO stage: `torchrun -m tests.support.zero_process FOLDER`.

Rank 0 writes FOLDER/zero-STAGE.pt: the weights after STEPS steps, the steps' reports, and what a bad gradient did.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configs import Config
from configs.training import Learner, Optimizer
from engine.wire import TrainSample
from learner.gradient import Gradient, micro_batches
from learner.placement import Placement, read_placement
from learner.policy import Policy
from learner.ranked import backend_type, join
from learner.shards import load_rank, save_rank
from learner.sharing import share_out
from tests.support.learner_inputs import learner_config, random_group, tiny_policy

STEPS = 3
STAGES = (1, 2, 3)
PROMPTS = [np.array([5, 9, 3, 7], dtype=np.int32), np.array([5, 9, 8], dtype=np.int32)]


def config_of(stage: int, ranks: int) -> Config:
    return learner_config(
        learner=Learner(backend="deepspeed", ranks=ranks, zero_stage=stage, micro_batch_tokens=40),
        optimizer=Optimizer(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1, warmup_steps=2),
    )


def policy_of() -> Policy:
    return tiny_policy()


def groups_of(step: int) -> list:
    """Three groups of different size, then one with a long answer: two ranks never get the same number of passes."""
    rng = np.random.default_rng(step)
    return [random_group(rng, index, lengths=lengths) for index, lengths in enumerate([(5, 1, 9), (3,), (30, 2), ()])]


def poisoned_groups() -> list:
    """One group whose advantage is not a number; it goes to one rank."""
    group = random_group(np.random.default_rng(9))
    bad = group.samples[0]
    group.samples[0] = TrainSample(0, bad.token_ids, bad.logprobs, bad.spans, 1.0, float("nan"))
    return [group]


def accumulate(backend, groups: list, placement: Placement) -> Gradient:
    shares = share_out(groups, placement.world_size)
    passes = max(len(micro_batches(share, Learner(micro_batch_tokens=40))) for share in shares)
    return backend.accumulate(shares[placement.rank], passes)


def num_tokens(groups: list) -> int:
    return sum(sample.token_ids.size for group in groups for sample in group.samples)


def train(stage: int, placement: Placement) -> dict:
    config = config_of(stage, placement.world_size)
    backend = backend_type()(policy_of(), config)
    reports = []
    for step in range(STEPS):
        groups = groups_of(step)
        for part in (groups[:2], groups[2:]):
            accumulate(backend, part, placement)
        reports.append(backend.optimizer_step(num_tokens(groups)))
    logprobs = backend.sequence_logprobs(PROMPTS)
    weights = copy(backend.weights(keeps=True))
    folder = checkpoint_of(stage)
    save_rank(folder, placement.rank, placement.world_size, backend.state())
    accumulate(backend, poisoned_groups(), placement)
    skipped = backend.optimizer_step(num_tokens(poisoned_groups()))
    after = copy(backend.weights(keeps=True))
    accumulate(backend, groups_of(9), placement)
    next_step = backend.optimizer_step(num_tokens(groups_of(9)))
    end = copy(backend.weights(keeps=True))
    backend.close()
    resumed, resumed_end = resume(config, folder, placement)
    return {
        "weights": weights, "reports": reports, "logprobs": logprobs, "skipped": skipped, "next_step": next_step,
        "after_skip": after, "end": end, "resumed": resumed, "resumed_end": resumed_end,
    }  # fmt: skip


def resume(config: Config, folder: Path, placement: Placement) -> tuple[dict, dict]:
    """The weights that a checkpoint gives back, and those one skipped and one other step later."""
    backend = backend_type()(policy_of(), config)
    backend.load_state(load_rank(folder, placement.rank, placement.world_size, backend.state()))
    resumed = copy(backend.weights(keeps=True))
    for groups in (poisoned_groups(), groups_of(9)):
        accumulate(backend, groups, placement)
        backend.optimizer_step(num_tokens(groups))
    end = copy(backend.weights(keeps=True))
    backend.close()
    return resumed, end


def checkpoint_of(stage: int) -> Path:
    folder = Path(sys.argv[1]) / f"checkpoint-{stage}"
    folder.mkdir(exist_ok=True)
    return folder


def copy(weights: list) -> dict:
    return {name: tensor.clone() for name, tensor in weights}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    placement = read_placement(os.environ, Learner(backend="deepspeed", ranks=int(os.environ["WORLD_SIZE"])))
    join(config_of(1, placement.world_size), placement)
    for stage in STAGES:
        result = train(stage, placement)
        if placement.rank == 0:
            torch.save(result, folder / f"zero-{stage}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
