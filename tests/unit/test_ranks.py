"""Rank 0 and its followers over real sockets, each follower in a thread: commands, failures, the end."""

import socket
import threading
from dataclasses import dataclass

import pytest

from engine.core.errors import DeadlineError
from learner import ranks
from learner.meeting import Line
from learner.ranks import Follower, Leader, RankLost

DEADLINE_S = 10.0


@dataclass(frozen=True)
class Add:
    value: int

    def run(self, target):
        return target.add(self.value)


@dataclass(frozen=True)
class Last:
    def run(self, target):
        return target.total


class Adder:
    def __init__(self):
        self.total = 0

    def add(self, value):
        if value < 0:
            raise ValueError(f"value must be >= 0, got {value}")
        self.total += value
        return self.total


class Hanging(Adder):
    """Stuck until `released`, as in a collective that nobody else enters."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def add(self, value):
        assert self.released.wait(DEADLINE_S)
        raise RuntimeError("connection closed by peer")


class Party:
    """A leader and followers; what a follower raised is kept under its rank."""

    def __init__(self, targets, deadline_s=DEADLINE_S):
        self.errors, self.exits, self.threads, lines = {}, [], [], {}
        self.peers = {}
        self.failed = threading.Event()
        for rank, target in enumerate(targets, start=1):
            here, there = socket.socketpair()
            lines[rank] = Line(here)
            self.peers[rank] = Line(there)
            if target is not None:
                follower = Follower(self.peers[rank], Last, self.exits.append)
                thread = threading.Thread(target=self._follow, args=(rank, follower, target))
                thread.start()
                self.threads.append(thread)
        self.leader = Leader(lines, deadline_s, self.failed.set, self.exits.append)

    def _follow(self, rank, follower, target):
        try:
            follower.follow(target)
        except (RankLost, ValueError) as exc:
            self.errors[rank] = exc
            self.peers[rank].shut_down()

    def join(self):
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(ranks, "BLAME_S", 0.05)
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)


def test_every_rank_runs_its_own_command_and_the_replies_come_in_order():
    party = Party([Adder(), Adder()])
    own = Adder()
    assert party.leader.everywhere([Add(1), Add(2), Add(3)], own) == [1, 2, 3]
    assert party.leader.everywhere([Add(1)] * 3, own) == [2, 3, 4]
    party.leader.close([Last()] * 3, own)
    party.join()
    assert (party.errors, party.leader.failure, party.exits) == ({}, "", [])


def test_an_exception_on_a_follower_ends_all_and_names_it():
    party = Party([Adder(), Adder()])
    with pytest.raises(RankLost, match=r"rank 2 failed: ValueError: value must be >= 0, got -1"):
        party.leader.everywhere([Add(1), Add(1), Add(-1)], Adder())
    party.join()
    assert isinstance(party.errors[2], ValueError)
    assert isinstance(party.errors[1], RankLost)
    assert "rank 2 failed" in str(party.errors[1])


def test_an_exception_on_rank_0_ends_the_followers():
    party = Party([Adder()])
    with pytest.raises(ValueError, match="got -1"):
        party.leader.everywhere([Add(-1), Add(1)], Adder())
    party.join()
    assert "rank 0 failed: ValueError: value must be >= 0, got -1" in str(party.errors[1])


def test_a_collective_that_breaks_because_a_rank_died_is_blamed_on_that_rank():
    party = Party([None])
    own = Hanging()
    threading.Timer(0.05, party.peers[1].shut_down).start()
    threading.Thread(target=lambda: party.failed.wait(DEADLINE_S) and own.released.set()).start()
    with pytest.raises(RankLost, match="rank 1 died"):
        party.leader.everywhere([Add(1), Add(1)], own)


def test_a_rank_that_dies_between_commands_is_noticed_and_the_others_told():
    party = Party([Adder(), None])
    party.peers[2].shut_down()
    assert party.failed.wait(DEADLINE_S)
    assert party.leader.failure == "rank 2 died: its connection closed"
    party.join()
    assert "rank 2 died" in str(party.errors[1])


def test_a_process_whose_work_is_stuck_is_ended_after_the_grace():
    party = Party([None])
    party.peers[1].shut_down()
    assert party.failed.wait(DEADLINE_S)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(DEADLINE_S)
    assert party.exits == [ranks.EXIT_RANK]


def test_a_rank_that_does_not_reply_in_time_is_named():
    hanging = Hanging()
    party = Party([hanging], deadline_s=0.5)
    with pytest.raises(DeadlineError, match=r"rank 1 did not finish Add within 0\.5 s"):
        party.leader.everywhere([Add(1), Add(1)], Adder())
    hanging.released.set()
    party.join()


def test_a_rank_answers_while_its_command_is_stuck():
    here, there = socket.socketpair()
    line, hanging = Line(here), Hanging()
    follower = Follower(Line(there), Last, [].append)

    def follow():
        with pytest.raises(RuntimeError):
            follower.follow(hanging)

    thread = threading.Thread(target=follow)
    thread.start()
    line.send(Add(1))
    line.send(ranks._Ping())
    assert isinstance(line.connection.recv(), ranks._Pong)
    hanging.released.set()
    thread.join(DEADLINE_S)


def test_a_rank_that_is_stopped_is_named_while_rank_0_waits_for_it_in_a_collective():
    party = Party([Adder(), None], deadline_s=0.5)
    own = Hanging()
    threading.Thread(target=lambda: party.failed.wait(DEADLINE_S) and own.released.set()).start()
    with pytest.raises(RankLost, match=r"rank 2 has not answered for .* s: it is stopped"):
        party.leader.everywhere([Add(1)] * 3, own)
    party.join()
    assert "rank 2 has not answered" in str(party.errors[1])


def test_a_collective_that_times_out_is_blamed_on_the_rank_that_is_silent(monkeypatch):
    monkeypatch.setattr(ranks, "PING_S", 0.01)
    party = Party([None])
    with pytest.raises(RankLost, match="rank 1 has not answered"):
        party.leader.everywhere([Add(-1), Add(1)], Adder())


@dataclass(frozen=True)
class Large(Add):
    content: bytes = b"x" * 20_000_000


def test_a_rank_that_takes_no_commands_is_named_and_nobody_waits_for_it(monkeypatch):
    monkeypatch.setattr(Line.__init__, "__defaults__", (0.1,))
    party = Party([None, Adder()])
    with pytest.raises(RankLost, match="rank 1 takes no commands"):
        party.leader.everywhere([Add(1), Large(1), Add(1)], Adder())
    party.join()
    assert "rank 1 takes no commands" in str(party.errors[2])


def test_abandoned_followers_end_with_the_reason():
    party = Party([Adder()])
    party.leader.abandon("the engine is gone")
    party.join()
    assert str(party.errors[1]) == "rank 0 failed: the engine is gone"
