"""Shards of master weights back to whole ones."""

import pytest
import torch

from engine.core.errors import DataError
from learner.checkpoint import state_file
from learner.shards import STAGE, merge_shards, read_masters, save_rank

SHAPES = {"a": torch.Size([2, 2]), "b": torch.Size([3])}
WEIGHTS = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0, 6.0, 7.0])}


@pytest.mark.parametrize(
    ("stage", "shards"),
    [(1, [[1, 2, 3, 4], [5, 6, 7, 0]]), (2, [[1, 2, 3, 4], [5, 6, 7, 0]]), (3, [[1, 2, 5, 6], [3, 4, 7, 0]])],
)
def test_shards_are_put_together_as_they_were_cut(stage, shards):
    merged = merge_shards([torch.tensor(shard, dtype=torch.float32) for shard in shards], SHAPES, stage)
    assert list(merged) == ["a", "b"]
    assert all(torch.equal(merged[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.parametrize(("stage", "lengths"), [(2, [3, 3]), (2, [4, 3]), (2, [6, 6]), (3, [5, 5]), (3, [4, 3])])
def test_shards_of_another_model_are_refused(stage, lengths):
    with pytest.raises(ValueError, match=rf"shards of ZeRO-{stage} must hold 7 weights"):
        merge_shards([torch.zeros(length) for length in lengths], SHAPES, stage)


def test_the_state_of_one_torch_rank_is_not_called_a_shard():
    with pytest.raises(ValueError, match=r"the state of one rank must hold 7 weights and padding, got lengths \[3\]"):
        merge_shards([torch.zeros(3)], SHAPES, 0)


def test_incomplete_and_mixed_states_are_refused(tmp_path):
    save_rank(tmp_path, 1, 2, {"master": torch.zeros(4), STAGE: torch.tensor(3)})
    with pytest.raises(DataError, match=r"state/rank-0-of-2\.safetensors must be there, missing"):
        read_masters(tmp_path, SHAPES)
    save_rank(tmp_path, 0, 2, {"master": torch.zeros(4), STAGE: torch.tensor(2)})
    with pytest.raises(DataError, match=r"must be of one ZeRO stage, are of \[2, 3\]"):
        read_masters(tmp_path, SHAPES)
    (tmp_path / state_file(0, 2)).write_bytes(b"no state")
    with pytest.raises(DataError, match=r"state/rank-0-of-2\.safetensors must hold the state of a rank"):
        read_masters(tmp_path, SHAPES)
