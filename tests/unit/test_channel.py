"""One end of a conversation: what it hands over again, and the clock that watches for silence."""

import asyncio

import pytest

from engine.core.errors import DeadlineError, PeerLost
from engine.transport.channel import Channel, Clock
from engine.wire import Ack, SampleFailed, SampleKey
from tests.support.virtual_loop import VirtualLoop, run


class Outlet:
    """Where parcels go; refuses them while it is shut."""

    def __init__(self):
        self.is_open = True
        self.parcels = []

    def transmit(self, parcel):
        if self.is_open:
            self.parcels.append(parcel)
        return self.is_open

    def numbers(self):
        """Numbers of the messages that got out, acknowledgements left out."""
        return [seq for seq, message in self.parcels if not isinstance(message, Ack)]


def channel_to(outlet, window=8):
    return Channel("peer 'w0'", window, lambda message, seq: (seq, message), outlet.transmit)


def message():
    return SampleFailed(key=SampleKey(0, 0), error="")


def test_after_one_refused_parcel_nothing_is_handed_over_before_all_of_it_is_repeated():
    async def main():
        outlet = Outlet()
        channel = channel_to(outlet)
        await channel.send(message(), 1.0)
        outlet.is_open = False
        await channel.send(message(), 1.0)
        outlet.is_open = True
        await channel.send(message(), 1.0)
        assert outlet.numbers() == [1]
        channel.show_life()
        assert outlet.numbers() == [1, 1, 2, 3]
        await channel.send(message(), 1.0)
        assert outlet.numbers() == [1, 1, 2, 3, 4]

    run(main())


def test_a_repetition_cut_short_is_begun_again():
    async def main():
        outlet = Outlet()
        channel = channel_to(outlet)
        await channel.send(message(), 1.0)
        outlet.is_open = False
        channel.resume()
        await channel.send(message(), 1.0)
        outlet.is_open = True
        channel.show_life()
        assert outlet.numbers() == [1, 1, 2]

    run(main())


def test_the_deadline_of_a_full_window_names_the_peer_and_the_message():
    async def main():
        channel = channel_to(Outlet(), window=1)
        await channel.send(message(), 1.0)
        with pytest.raises(DeadlineError, match=r"peer 'w0' acknowledged nothing for 3 s .* SampleFailed"):
            await channel.send(message(), 3.0)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)

    run(main())


def test_a_failed_channel_tells_those_who_wait_and_those_who_come():
    async def main():
        channel = channel_to(Outlet(), window=1)
        await channel.send(message(), 1.0)

        async def wait():
            with pytest.raises(PeerLost, match="unplugged"):
                await channel.send(message(), 100.0)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            group.create_task(wait())
            await asyncio.sleep(1.0)
            channel.fail("unplugged")
        await wait()
        assert asyncio.get_running_loop().time() < 2.0

    run(main())


def test_a_cancelled_sender_gives_up_its_turn_and_sends_nothing():
    async def main():
        outlet = Outlet()
        channel = channel_to(outlet, window=1)
        await channel.send(message(), 1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await channel.send(message(), 100.0)
        channel.on_ack(1)
        await channel.send(message(), 1.0)
        assert outlet.numbers() == [1, 2]

    run(main())


def test_the_clock_beats_every_quarter_and_stops():
    async def main():
        beats = []
        loop = asyncio.get_running_loop()
        clock = Clock(8.0, lambda is_late: beats.append((loop.time(), is_late)))
        await asyncio.sleep(7.0)
        clock.stop()
        await asyncio.sleep(10.0)
        assert beats == [(2.0, False), (4.0, False), (6.0, False)]
        assert clock.silent_after_s == 6.0

    run(main())


def test_a_beat_after_a_pause_of_the_whole_loop_is_late_and_the_next_is_not():
    async def main():
        beats = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock = Clock(8.0, beats.append)
        await asyncio.sleep(3.0)
        loop.pause(60.0)
        await asyncio.sleep(2.5)
        clock.stop()
        assert beats == [False, True, False]

    run(main())


def test_a_silence_deadline_must_be_positive():
    async def main():
        with pytest.raises(ValueError, match="silence_deadline_s must be > 0"):
            Clock(0.0, lambda is_late: None)

    run(main())
