"""Rank 0 and its followers find each other whoever else knocks, and no line blocks for ever."""

import socket
import struct
import threading
import time

import pytest

from engine.core.errors import DeadlineError
from learner import meeting as meeting_module
from learner.meeting import Line, find_leader, gather_followers, open_meeting

DEADLINE_S = 10.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""


def wrong_key(stranger):
    stranger.sendall(b"x" * 36)


def reset(stranger):
    stranger.sendall(b"x")
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    stranger.close()


def leave(stranger):
    stranger.close()


def stay_mute(_):
    pass


@pytest.mark.parametrize("behave", [wrong_key, reset, leave, stay_mute])
def test_ranks_meet_whatever_a_stranger_does(monkeypatch, behave):
    monkeypatch.setattr(meeting_module, "GREETING_S", 0.05)
    listener, meeting = open_meeting("127.0.0.1")
    stranger = socket.create_connection((meeting.host, meeting.port))
    behave(stranger)
    followers = {}
    threads = [
        threading.Thread(target=lambda rank=rank: followers.update({rank: find_leader(rank, meeting, DEADLINE_S)}))
        for rank in (2, 1)
    ]
    for thread in threads:
        thread.start()
    found = gather_followers(listener, meeting, 2, DEADLINE_S)
    for thread in threads:
        thread.join()
    assert list(found) == [1, 2]
    for rank in (1, 2):
        found[rank].send(rank)
        assert followers[rank].connection.recv() == rank
    stranger.close()


def test_ranks_that_do_not_come_are_named():
    listener, meeting = open_meeting("127.0.0.1")
    with pytest.raises(DeadlineError, match=r"ranks \[1, 2\] did not come"):
        gather_followers(listener, meeting, 2, 0.05)


def test_strangers_do_not_put_off_the_deadline(monkeypatch):
    monkeypatch.setattr(meeting_module, "GREETING_S", DEADLINE_S)
    listener, meeting = open_meeting("127.0.0.1")
    strangers = [socket.create_connection((meeting.host, meeting.port)) for _ in range(3)]
    began_at = time.monotonic()
    with pytest.raises(DeadlineError, match=r"did not come to rank 0 within 0\.05 s"):
        gather_followers(listener, meeting, 1, 0.05)
    assert time.monotonic() - began_at < DEADLINE_S / 2
    for stranger in strangers:
        stranger.close()


def test_a_send_to_a_rank_that_takes_nothing_ends():
    here, there = socket.socketpair()
    with there, pytest.raises(OSError, match="temporarily unavailable"):
        Line(here, silence_s=0.1).send(b"x" * 20_000_000)


def test_a_send_to_a_machine_that_is_gone_ends_with_its_connection():
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    with listener, socket.socket(fileno=peer.detach()) as kept:
        line = Line(kept.dup())
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
        line.shut_down()
