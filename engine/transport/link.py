"""A peer's side without its socket: one engine, from hello to the end.

Invariants: nothing of the engine's is seen before its first `Welcome`; every new connection says hello again with the
same life; what arrived before the engine was lost is still handed over; another engine life is a lost engine; the
window is the engine's.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic

from engine.core.errors import DeadlineError, PeerLost, RunError, WireError
from engine.transport.base import DEFAULT_WINDOW
from engine.transport.channel import FAREWELL_S, MAX_GRACE_S, Channel
from engine.transport.session import Parcel
from engine.wire import Ack, Closed, Hello, Message, Refused, Welcome

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 2.0
HELLO_AGAIN_S = 1.0
"""An unanswered hello is repeated: a connection that breaks in the middle of a send can swallow the next message."""


class LinkSide(ABC, Generic[Parcel]):
    """The channel to the engine and what came through it."""

    def __init__(self, hello: Hello, grace_s: float = MAX_GRACE_S) -> None:
        self.policy_version = -1
        """Version the engine named in its last `Welcome`; -1 before the first."""
        self._hello = hello
        self._grace_s = grace_s
        self._grace: asyncio.TimerHandle | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._channel = self._open_channel(DEFAULT_WINDOW)
        self._engine_life: str | None = None
        self._heard_at = self._loop.time()
        self._is_closed = False
        self._inbox: deque[Message] = deque()  # bounded: the channel accepts window messages that are not consumed
        self._arrived = asyncio.Event()  # set when a message waits, the engine welcomed us or is lost

    @abstractmethod
    def _pack(self, message: Message, seq: int) -> Parcel: ...

    @abstractmethod
    def _transmit(self, parcel: Parcel) -> bool: ...

    @abstractmethod
    async def _release(self) -> None:
        """Give back what carries the parcels."""

    async def receive(self) -> Message:
        """The engine's next message; waits without limit (the caller owns the deadline).

        Raises:
            PeerLost: the engine is gone, dropped us, or this link was closed; never before all that arrived was taken.
        """
        while not self._inbox:
            if self._channel.lost is not None:
                raise PeerLost(f"the engine is gone: {self._channel.lost}")
            self._arrived.clear()
            await self._arrived.wait()
        message = self._inbox.popleft()
        if self._channel.lost is None and self._channel.consume() and not self._inbox:
            self._channel.acknowledge_arrivals()
        return message

    async def send(self, message: Message, deadline_s: float = 30.0) -> None:
        """Hand `message` to the engine; waits while the window is full.

        Raises:
            PeerLost: the engine is gone, or went while this waited.
            DeadlineError: the window stayed full for `deadline_s`.
        """
        await self._channel.send(message, deadline_s)

    async def close(self) -> None:
        """Wait up to 2 s for outstanding acknowledgements, say so, give back the socket; once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._say_goodbye()
        finally:
            self._lose("this link is closed")
            await self._release()

    async def _say_goodbye(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await self._channel.flush()
        except TimeoutError:
            logger.warning("link closed with %s unacknowledged messages", self._channel.outstanding)
        if self._channel.lost is not None:
            return
        self._transmit(self._pack(Closed(reason="clean exit"), 0))
        try:
            async with asyncio.timeout(FAREWELL_S):
                while self._channel.lost is None:  # the engine's goodbye ends it
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            logger.info("no answer to the farewell")

    def _open_channel(self, window: int) -> Channel[Parcel]:
        return Channel("the engine", window, self._pack, self._transmit)

    async def _join(self, where: str, deadline_s: float) -> None:
        """Wait for the engine's answer to the hello.

        Raises:
            RunError: it refused.
            DeadlineError: it did not answer within `deadline_s`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while self._engine_life is None and self._channel.lost is None:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as exc:
            raise DeadlineError(
                f"no engine answered at {where} within {deadline_s:g} s; is it running, and is the address right?"
            ) from exc
        if self._channel.lost is not None:
            raise RunError(f"the engine at {where} did not take {self._hello.name!r}: {self._channel.lost}")

    def _on_connect(self) -> None:
        """A connection stands: say who we are; the answer resumes the conversation."""
        self._stop_hello()
        if self._channel.lost is None:
            self._transmit(self._pack(self._hello, 0))
            self._hello_timer = self._loop.call_later(HELLO_AGAIN_S, self._on_connect)

    def _stop_hello(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _on_disconnect(self) -> None:
        self._stop_hello()
        if self._engine_life is not None and self._grace is None and self._channel.lost is None:
            reason = f"disconnected and not back within {self._grace_s:g} s"
            self._grace = self._loop.call_later(self._grace_s, self._lose, reason)

    def _on_message(self, seq: int, message: Message) -> None:
        self._heard_at = self._loop.time()
        if self._channel.lost is not None:
            return
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Refused | Closed):
            if not self._is_closed:
                self._transmit(self._pack(Closed(reason="goodbye"), 0))
            self._lose(message.reason)
        elif self._engine_life is not None:  # before the welcome: the rest of what an earlier life was sent
            try:
                if isinstance(message, Ack):
                    self._channel.on_ack(message.seq)
                elif self._channel.accept(seq):
                    self._inbox.append(message)
                    self._arrived.set()
            except WireError as exc:
                self._lose(str(exc))

    def _on_garbage(self, error: WireError) -> None:
        self._lose(str(error))

    def _on_welcome(self, welcome: Welcome) -> None:
        self.policy_version = welcome.policy_version
        self._stop_timers()
        if self._engine_life is None:
            self._engine_life = welcome.life
            self._channel = self._open_channel(welcome.window or DEFAULT_WINDOW)
            self._arrived.set()
        elif self._engine_life != welcome.life:
            self._lose("it restarted and knows nothing of this life")
        else:
            logger.info("reconnected to the engine, %s messages sent again", self._channel.outstanding)
            self._channel.resume()

    def _on_beat(self, is_late: bool, silent_after_s: float) -> None:
        silent_s = self._loop.time() - self._heard_at
        if self._engine_life is None or self._channel.lost is not None:
            return
        if not is_late and silent_s >= silent_after_s:
            self._lose(f"silent for {silent_s:.1f} s")
        else:
            self._channel.show_life()

    def _stop_timers(self) -> None:
        self._stop_hello()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _lose(self, reason: str) -> None:
        self._stop_timers()
        self._channel.fail(reason)
        self._arrived.set()
