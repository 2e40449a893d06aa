"""How a trainer ends: segments go first, and what needs all ranks runs in the compute thread."""

import threading

import torch

from configs import Config
from learner.publish import SegmentPublisher
from learner.trainer import TorchTrainer

DEADLINE_S = 10.0


class RankedStub:
    """Notes from which thread it was ended, and how."""

    failure = ""

    def __init__(self):
        self.ended = []

    def close(self):
        self.ended.append(("close", threading.current_thread().name))

    def abandon(self, cause):
        self.ended.append(("abandon", cause))


def trainer_of(tmp_path):
    trainer = TorchTrainer(Config(), tmp_path / "run")
    shared = tmp_path / "shared"
    shared.mkdir()
    trainer._publisher = SegmentPublisher(shared)
    trainer._ranked = RankedStub()
    return trainer, shared


def test_segments_are_gone_while_the_compute_thread_is_still_stuck(tmp_path):
    trainer, shared = trainer_of(tmp_path)
    is_released = threading.Event()
    trainer.__enter__()
    trainer._publisher.lay_out(0, [("a", torch.zeros(4))], [])
    trainer._thread.submit(is_released.wait, DEADLINE_S)
    assert list(shared.iterdir())
    abandoned = threading.Event()
    trainer._ranked.abandon = lambda _cause: abandoned.set()
    error = KeyboardInterrupt()
    ending = threading.Thread(target=trainer.__exit__, args=(KeyboardInterrupt, error, None))
    ending.start()
    assert abandoned.wait(DEADLINE_S)
    assert list(shared.iterdir()) == []
    assert ending.is_alive()
    is_released.set()
    ending.join(DEADLINE_S)


def test_a_process_that_is_ended_at_once_leaves_no_segment_and_its_cause(tmp_path, monkeypatch):
    trainer, shared = trainer_of(tmp_path)
    exits = []
    monkeypatch.setattr("os._exit", exits.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with trainer:
        trainer._publisher.lay_out(0, [("a", torch.zeros(4))], [])
        trainer._ranked.failure = "rank 1 died: its connection closed"
        trainer._end_process(5)
        assert list(shared.iterdir()) == []
    assert exits == [5]
    assert "rank 1 died" in (tmp_path / "error.json").read_text()


def test_the_last_command_runs_in_the_compute_thread(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    with trainer:
        pass
    ((kind, thread),) = trainer._ranked.ended
    assert kind == "close"
    assert thread.startswith("compute")
