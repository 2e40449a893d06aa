"""The generation workers: who is live, how many slots are free, which request runs where.

Plain state, no I/O. Invariants: a request runs on one worker at most; a fenced or unsynchronised worker gets none; the
generation version is that of the oldest live worker. Routing: the live worker with the most free slots.
"""

from dataclasses import dataclass, field
from typing import Literal

from engine.wire import Hello, SampleKey


@dataclass(slots=True)
class Worker:
    """One generation worker."""

    name: str
    slots: int
    max_context_tokens: int
    policy_version: int = 0
    state: Literal["syncing", "live"] = "syncing"
    in_flight: set[SampleKey] = field(default_factory=set[SampleKey])

    @property
    def num_free(self) -> int:
        """Requests it could take now."""
        return self.slots - len(self.in_flight) if self.state == "live" else 0


@dataclass(slots=True)
class Fleet:
    """All connected workers."""

    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    _where: dict[SampleKey, Worker] = field(default_factory=dict[SampleKey, Worker])

    def join(self, hello: Hello) -> Worker:
        """A worker said hello; it gets no request before `activate`."""
        worker = Worker(hello.name, hello.slots, hello.max_context_tokens, hello.policy_version)
        self.workers[hello.name] = worker
        return worker

    def activate(self, name: str, policy_version: int) -> None:
        """The worker holds verified weights of `policy_version`."""
        worker = self.workers[name]
        worker.policy_version = policy_version
        worker.state = "live"

    def leave(self, name: str) -> list[SampleKey]:
        """The worker is gone or fenced; returns the requests it had."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        for key in worker.in_flight:
            del self._where[key]
        return sorted(worker.in_flight, key=lambda key: (key.arm, key.index))

    def assign(self, key: SampleKey) -> str | None:
        """Take a slot for `key`; the worker's name, or None when all slots are busy."""
        worker = max(self.workers.values(), key=lambda w: w.num_free, default=None)
        if worker is None or worker.num_free < 1:
            return None
        worker.in_flight.add(key)
        self._where[key] = worker
        return worker.name

    def release(self, key: SampleKey) -> bool:
        """The request ended; False when it is not known (a message of a worker that was given up)."""
        worker = self._where.pop(key, None)
        if worker is None:
            return False
        worker.in_flight.discard(key)
        return True

    def where(self, key: SampleKey) -> str | None:
        """The worker that runs `key`."""
        worker = self._where.get(key)
        return worker.name if worker else None

    @property
    def live(self) -> list[Worker]:
        """Workers that take requests."""
        return [worker for worker in self.workers.values() if worker.state == "live"]

    @property
    def num_free(self) -> int:
        """Free slots of all live workers."""
        return sum(worker.num_free for worker in self.workers.values())

    @property
    def num_in_flight(self) -> int:
        """Requests under way."""
        return len(self._where)

    @property
    def num_slots(self) -> int:
        """Slots of all live workers."""
        return sum(worker.slots for worker in self.live)

    @property
    def generation_version(self) -> int:
        """Version that the oldest live worker samples from; 0 without one."""
        return min((worker.policy_version for worker in self.live), default=0)
