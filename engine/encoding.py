"""Token ids of prompts, asked of a live worker: the engine itself knows no tokenizer.

Every request has a deadline; a worker that is lost in between is replaced by another one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.errors import DeadlineError, PeerLost
from engine.fleet import Fleet
from engine.transport.base import Hub
from engine.wire import Encode, Encoded, Int32s

ENCODE_DEADLINE_S = 60.0
"""Tokenizing a chunk of prompts takes milliseconds; a worker in its first weight update may need seconds."""


@dataclass(slots=True)
class _Request:
    worker: str
    reply: asyncio.Future[list[Int32s]]


@dataclass(slots=True)
class Encoder:
    """Asks workers for token ids."""

    hub: Hub
    fleet: Fleet
    chat_template: bool
    _requests: dict[int, _Request] = field(default_factory=dict[int, _Request])
    _num_requests: int = 0

    async def encode(self, prompts: Sequence[str]) -> list[Int32s]:
        """Token ids of each prompt, chat template applied.

        Raises:
            PeerLost: no live worker is left.
            DeadlineError: a worker did not answer in time.
        """
        while self.fleet.live:
            worker = self.fleet.live[0].name
            self._num_requests += 1
            request = self._num_requests
            reply: asyncio.Future[list[Int32s]] = asyncio.get_running_loop().create_future()
            self._requests[request] = _Request(worker, reply)
            message = Encode(request=request, prompts=list(prompts), chat_template=self.chat_template)
            try:
                await self.hub.send(worker, message)
                async with asyncio.timeout(ENCODE_DEADLINE_S):
                    return await reply
            except PeerLost:
                continue
            except TimeoutError as exc:
                raise DeadlineError(f"worker {worker} did not encode {len(prompts)} prompts in time") from exc
            finally:
                del self._requests[request]
        raise PeerLost("no live worker to encode prompts")

    def on_encoded(self, message: Encoded) -> None:
        """A worker answered."""
        request = self._requests.get(message.request)
        if request is not None and not request.reply.done():
            request.reply.set_result(message.token_ids)

    def on_worker_lost(self, name: str) -> None:
        """Requests of a lost worker go to another one."""
        for request in self._requests.values():
            if request.worker == name and not request.reply.done():
                request.reply.set_exception(PeerLost(f"worker {name} is gone"))
