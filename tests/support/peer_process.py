"""A real process at one end of a transport, to be killed or stopped: `python -m tests.support.peer_process ROLE ...`.

`link ADDRESS NAME` joins, sends what it receives back, and counts up by itself when told `burst:N`.
`hub PORT` listens, writes its address, and sends everything back to its sender.
"""

import os
import sys
import uuid

import uvloop

from engine.core.errors import PeerLost
from engine.transport.base import Received
from engine.transport.zmq import ZmqHub, ZmqLink
from engine.wire import PROTOCOL_VERSION, Hello, SampleFailed, SampleKey


async def run_link(address: str, name: str) -> None:
    """Echo; a `SampleFailed` of error `burst:N` asks for N numbered ones instead."""
    hello = Hello(protocol=PROTOCOL_VERSION, role="worker", name=name, life=uuid.uuid4().hex, pid=os.getpid())
    link = await ZmqLink.connect(address, hello)
    try:
        while True:
            message = await link.receive()
            if isinstance(message, SampleFailed) and message.error.startswith("burst:"):
                for index in range(int(message.error.removeprefix("burst:"))):
                    await link.send(SampleFailed(key=SampleKey(0, index), error=""))
            else:
                await link.send(message)
    except PeerLost:
        await link.close()


async def run_hub(port: int) -> None:
    """Echo to everybody."""
    hub = await ZmqHub.bind("127.0.0.1", port)
    sys.stdout.write(hub.address + "\n")
    sys.stdout.flush()
    while True:
        event = await hub.receive()
        if isinstance(event, Received):
            await hub.send(event.peer, event.message)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    uvloop.run(run_link(*arguments) if role == "link" else run_hub(int(arguments[0])))
