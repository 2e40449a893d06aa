"""How groups are shared out over ranks, and what a process reads of its place."""

import json

import numpy as np
import pytest

from configs import Config
from configs.load import ConfigError
from configs.training import Learner
from engine.cores import CorePlan
from engine.launch import learner_command
from learner.placement import Placement, read_placement, tell_launcher
from learner.sharing import group_cost, share_out
from tests.support.learner_inputs import random_group


def group_of(cost_root, group_id):
    """A group whose one segment has `cost_root` tokens."""
    prompt = np.arange(2, dtype=np.int32)
    return random_group(np.random.default_rng(0), group_id, prompt=prompt, lengths=(cost_root - 2,))


def test_a_group_costs_the_scores_of_its_attention():
    prompt = np.arange(10, dtype=np.int32)
    rng = np.random.default_rng(0)
    assert group_cost(random_group(rng, prompt=prompt, lengths=(5, 0))) == 15**2
    assert group_cost(random_group(rng, prompt=prompt, lengths=(5, 0, 7))) == 10**2 + 5 * 15 + 7 * 17
    assert group_cost(random_group(rng, lengths=())) == 0


def test_shares_balance_squared_lengths_and_not_counts():
    groups = [group_of(length, index) for index, length in enumerate([4, 10, 5, 6, 3])]
    shares = share_out(groups, 2)
    assert [[group.group_id for group in share] for share in shares] == [[1], [0, 2, 3, 4]]


def test_every_group_goes_to_one_rank_and_the_costliest_share_is_near_the_mean():
    rng = np.random.default_rng(1)
    groups = [group_of(int(length), index) for index, length in enumerate(rng.integers(3, 400, 60))]
    shares = share_out(groups, 4)
    assert sorted(group.group_id for share in shares for group in share) == list(range(60))
    loads = [sum(map(group_cost, share)) for share in shares]
    assert max(loads) < 1.05 * sum(loads) / 4
    assert all(share == sorted(share, key=lambda group: group.group_id) for share in shares)


def test_ranks_without_a_group_get_an_empty_share():
    assert [len(share) for share in share_out([group_of(5, 0)], 3)] == [1, 0, 0]
    assert share_out([], 2) == [[], []]


def test_a_process_without_a_launcher_is_the_only_rank():
    assert read_placement({}, Learner()) == Placement(0, 1, 0, 1)


@pytest.mark.parametrize("local_size", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_a_launcher_gives_a_process_its_place(local_size):
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", local_size: "2"}
    placement = read_placement(environ, Learner(backend="deepspeed", ranks=4))
    assert placement == Placement(3, 4, 1, 2)
    assert not placement.is_local


def test_more_processes_than_configured_ranks_are_refused():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match=r"learner\.ranks must be .* 2, got 1"):
        read_placement(environ, Learner())


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE in the environment must be a number where RANK is set, got None"),
        ({"RANK": "x", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK in the environment must be a number .* got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "y"}, "LOCAL_SIZE .* got 'y'"),
    ],
)
def test_a_launcher_that_says_half_is_refused(environ, words):
    with pytest.raises(ConfigError, match=words):
        read_placement(environ, Learner())


def test_a_cause_that_the_launcher_cannot_hear_is_no_second_failure(tmp_path, caplog):
    tell_launcher("disk full", {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "disk full"
    tell_launcher("disk full", {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone" / "error.json")})
    assert "will not hear" in caplog.text


@pytest.mark.parametrize(("backend", "kind"), [("torch", "torch"), ("deepspeed", "simulated")])
def test_several_ranks_need_deepspeed(backend, kind):
    with pytest.raises(ValueError, match=r"learner\.ranks must be 1 unless"):
        Learner(backend=backend, kind=kind, ranks=2)


def test_the_engine_starts_several_ranks_by_torchrun_and_one_without(tmp_path):
    class Folder:
        path = tmp_path

        @staticmethod
        def log_path(name):
            return tmp_path / f"{name}.log"

    def arguments(**learner):
        return learner_command(Config(learner=Learner(**learner)), Folder, "ADDRESS", CorePlan((), ())).arguments

    one, two = arguments(backend="deepspeed"), arguments(backend="deepspeed", ranks=2)
    assert one[:2] == ["-m", "learner.train"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert two[: -len(one)] == [*launcher, "--log-dir", str(tmp_path / "learner")]
    assert two[-len(one) :] == one
