"""Cores are split without overlap; requests go to live workers with free slots, one each."""

import pytest

from configs.processes import Cores
from engine.cores import plan_cores
from engine.fleet import Fleet
from engine.wire import PROTOCOL_VERSION, Hello, SampleKey


def hello(name: str, slots: int = 2) -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, role="worker", name=name, life="a", pid=1, slots=slots)


def fleet(**workers: int) -> Fleet:
    made = Fleet()
    for name, slots in workers.items():
        made.join(hello(name, slots))
        made.activate(name, 0)
    return made


@pytest.mark.parametrize(
    ("available", "workers", "generation", "learning"),
    [
        ((0, 1), 1, ((0,),), (1,)),
        ((0,), 1, ((0,),), (0,)),
        ((0, 1, 2, 3), 2, ((0,), (1,)), (2, 3)),
        ((4, 5, 6), 1, ((4,),), (5, 6)),
        ((0, 1), 2, ((0,), (0,)), (1,)),
        ((0, 1), 3, ((0,), (0,), (0,)), (1,)),
    ],
)
def test_generation_and_learning_get_disjoint_halves(available, workers, generation, learning) -> None:
    plan = plan_cores(Cores(lend=False), workers, available)
    assert (plan.generation, plan.learning) == (generation, learning)


def test_the_last_of_several_workers_borrows_the_cores_of_the_learner() -> None:
    plan = plan_cores(Cores(), 2, (0, 1))
    assert (plan.generation, plan.learning, plan.borrower) == (((0,), (1,)), (1,), 1)
    assert "worker-1 1 (while the learner waits)" in plan.describe()
    assert plan_cores(Cores(), 1, (0, 1)).borrower == -1


def test_configured_cores_are_taken_and_unknown_ones_refused() -> None:
    plan = plan_cores(Cores(generation=(1,), learning=(0,)), 1, (0, 1))
    assert (plan.generation, plan.learning) == (((1,),), (0,))
    with pytest.raises(ValueError, match=r"cores.learning must be among 0,1, got 7"):
        plan_cores(Cores(learning=(7,)), 1, (0, 1))


def test_unpinned_means_unpinned() -> None:
    assert plan_cores(Cores(pin=False), 2, (0, 1)).describe() == "cores: not pinned"


def test_a_request_goes_to_the_worker_with_most_free_slots_until_all_are_busy() -> None:
    workers = fleet(a=1, b=2)
    keys = [SampleKey(0, index) for index in range(4)]
    assert [workers.assign(key) for key in keys] == ["b", "a", "b", None]
    assert workers.release(keys[1])
    assert workers.assign(keys[3]) == "a"


def test_a_worker_that_is_not_live_gets_nothing() -> None:
    workers = Fleet()
    workers.join(hello("a"))
    assert workers.assign(SampleKey(0, 0)) is None
    workers.activate("a", 3)
    assert workers.assign(SampleKey(0, 0)) == "a"
    assert workers.generation_version == 3


def test_a_lost_worker_hands_back_its_requests_once() -> None:
    workers = fleet(a=3, b=1)
    keys = [SampleKey(0, index) for index in range(3)]
    for key in keys:
        workers.assign(key)
    lost = workers.leave("a")
    assert set(lost) <= set(keys)
    assert workers.leave("a") == []
    assert not workers.release(lost[0])
    assert workers.num_in_flight == 3 - len(lost)
