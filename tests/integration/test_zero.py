"""ZeRO-1, 2 and 3 on two real ranks do what one rank of plain torch does: steps, skipped steps, states."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.errors import DataError
from learner.backends.torch import TorchBackend
from learner.shards import check_world, read_masters
from tests.support import zero_process

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
MAX_DIFFERENCE, MEAN_DIFFERENCE = 5e-5, 1e-6
"""Of float32 weights that 3 AdamW steps moved by up to 2.5e-2. Sums in another order differ by ulps (the mean); where a
gradient nearly cancels, AdamW makes a larger difference of them (2 of 21,728 weights were over 5e-6)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "-m", "tests.support.zero_process", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def plain():
    backend = TorchBackend(zero_process.policy_of(), zero_process.config_of(2, RANKS))
    reports = []
    for step in range(zero_process.STEPS):
        groups = zero_process.groups_of(step)
        backend.accumulate(groups)
        reports.append(backend.optimizer_step(zero_process.num_tokens(groups)))
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    return weights, reports, backend.sequence_logprobs(zero_process.PROMPTS)


@pytest.fixture(scope="module", params=zero_process.STAGES)
def trained(request, folder):
    return torch.load(folder / f"zero-{request.param}.pt", weights_only=False)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_three_steps_on_two_ranks_give_the_weights_of_one_torch_rank(trained, plain):
    weights, reports, logprobs = plain
    start = dict(zero_process.policy_of().weights())
    assert trained["weights"].keys() == weights.keys()
    for name, tensor in weights.items():
        difference = (trained["weights"][name] - tensor).abs()
        assert difference.max() < MAX_DIFFERENCE, name
        assert difference.mean() < MEAN_DIFFERENCE, name
        assert (tensor - start[name]).abs().mean() > 1000 * MEAN_DIFFERENCE, name
    for ours, theirs in zip(trained["reports"], reports, strict=True):
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert (ours.lr, ours.is_skipped) == (theirs.lr, theirs.is_skipped)
    for ours, theirs in zip(trained["logprobs"], logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_forgotten(trained):
    assert trained["skipped"].is_skipped
    assert_same(trained["after_skip"], trained["weights"])
    assert not trained["next_step"].is_skipped
    assert np.isfinite(trained["next_step"].grad_norm)
    assert all(torch.isfinite(tensor).all() for tensor in trained["end"].values())


def test_a_resumed_state_goes_on_bit_for_bit(trained):
    assert_same(trained["resumed"], trained["weights"])
    assert_same(trained["resumed_end"], trained["end"])
    assert not torch.equal(trained["end"]["model.norm.weight"], trained["weights"]["model.norm.weight"])


@pytest.mark.parametrize("stage", zero_process.STAGES)
def test_merged_shards_are_the_weights(folder, stage):
    weights = torch.load(folder / f"zero-{stage}.pt", weights_only=False)["weights"]
    model = zero_process.policy_of().model
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    masters = read_masters(folder / f"checkpoint-{stage}", shapes)
    assert masters.keys() == shapes.keys()
    assert all(torch.equal(master, weights[name]) for name, master in masters.items())
    with pytest.raises(DataError, match="must hold"):
        read_masters(folder / f"checkpoint-{stage}", shapes | {"extra": torch.Size([100])})


def test_states_of_another_number_of_ranks_are_refused(folder):
    check_world(folder / "checkpoint-3", RANKS)
    with pytest.raises(DataError, match=r"learner\.ranks must be 2, got 3"):
        check_world(folder / "checkpoint-3", 3)
    with pytest.raises(DataError, match="has none"):
        check_world(folder, RANKS)
