"""The reliable session: whatever a connection loses, repeats or reorders, messages count once and in order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.errors import WireError
from engine.transport.session import Inbox, Outbox

ACTIONS = st.lists(
    st.sampled_from(["send", "send", "send", "deliver", "deliver", "repeat", "swap", "lose", "read", "ack", "cut"]),
    max_size=200,
)


class OneWay:
    """A sender, a receiver and what is on its way between them; a cut loses all of that and resumes."""

    def __init__(self, window: int) -> None:
        self.outbox: Outbox[int] = Outbox(window)
        self.inbox = Inbox(window)
        self.on_way: list[int] = []
        self.acks: list[int] = []
        self.waiting: list[int] = []
        self.read: list[int] = []
        self.most_waiting = 0

    def act(self, action: str) -> None:
        if action == "send" and self.outbox.has_room:
            seq = self.outbox.next_seq
            self.outbox.push(seq)
            self.on_way.append(seq)
        elif action == "deliver" and self.on_way:
            self.arrive(self.on_way.pop(0))
        elif action == "repeat" and self.on_way:
            self.arrive(self.on_way[0])
        elif action == "swap" and len(self.on_way) > 1:
            self.on_way[0], self.on_way[1] = self.on_way[1], self.on_way[0]
        elif action == "lose" and self.on_way:
            self.on_way.pop()
        elif action == "read" and self.waiting:
            self.read.append(self.waiting.pop(0))
            self.inbox.consume()
            self.acks.append(self.inbox.acknowledge())
        elif action == "ack" and self.acks:
            self.outbox.acknowledge(self.acks.pop(0))
        elif action == "cut":
            self.on_way = self.outbox.unacknowledged()
            self.acks = [self.inbox.acknowledge()]

    def arrive(self, seq: int) -> None:
        if self.inbox.accept(seq):
            self.waiting.append(seq)
        self.most_waiting = max(self.most_waiting, len(self.waiting))


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, window=st.integers(1, 8))
def test_every_message_is_read_once_and_in_order_after_the_last_reconnection(actions, window):
    way = OneWay(window)
    for action in actions:
        way.act(action)
        assert way.read == list(range(1, len(way.read) + 1))
        assert way.outbox.outstanding <= window
        assert way.most_waiting <= window
    sent = way.outbox.next_seq - 1
    way.act("cut")
    while way.on_way:
        way.act("deliver")
    while way.waiting:
        way.act("read")
    while way.acks:
        way.act("ack")
    assert way.read == list(range(1, sent + 1))
    assert way.outbox.outstanding == 0


def test_a_message_behind_a_gap_is_ignored_until_the_gap_is_filled():
    inbox = Inbox(8)
    assert inbox.accept(1)
    assert not inbox.accept(3)
    assert inbox.accept(2)
    assert inbox.accept(3)
    assert not inbox.accept(2)


def test_a_sender_past_its_window_is_an_error():
    inbox = Inbox(2)
    inbox.accept(1)
    inbox.accept(2)
    with pytest.raises(WireError, match="window of 2"):
        inbox.accept(3)


def test_consuming_without_acknowledging_does_not_open_the_window():
    inbox = Inbox(2)
    inbox.accept(1)
    inbox.accept(2)
    inbox.consume()
    with pytest.raises(WireError, match="window"):
        inbox.accept(3)
    assert inbox.acknowledge() == 1
    assert inbox.accept(3)


def test_an_unnumbered_message_is_an_error():
    with pytest.raises(WireError, match="numbered from 1"):
        Inbox(2).accept(0)


def test_an_acknowledgement_of_something_never_sent_is_an_error():
    outbox = Outbox(2)
    outbox.push("a")
    with pytest.raises(WireError, match="only 1 were sent"):
        outbox.acknowledge(2)


def test_acknowledgements_are_cumulative_and_old_ones_change_nothing():
    outbox = Outbox(4)
    for item in "abc":
        outbox.push(item)
    assert outbox.acknowledge(2) == 2
    assert outbox.acknowledge(1) == 0
    assert outbox.unacknowledged() == ["c"]


def test_an_acknowledgement_is_due_after_a_quarter_of_the_window():
    inbox = Inbox(8)
    inbox.accept(1)
    inbox.accept(2)
    inbox.consume()
    assert inbox.is_ack_pending
    assert not inbox.is_ack_due
    inbox.consume()
    assert inbox.is_ack_due
    assert inbox.acknowledge() == 2
    assert not inbox.is_ack_pending


@pytest.mark.parametrize("end", [Outbox, Inbox])
def test_a_window_without_room_is_refused(end):
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        end(0)
