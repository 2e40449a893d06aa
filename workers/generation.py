"""The worker's half of the wire: one session that every generation backend shares.

Invariants:
- Every `Generate` is answered once, by `SampleDone` or `SampleFailed` (an aborted one too, with its partial tokens).
- A sample with tokens of a version is sent only after that version's canary passed; `Applied` goes first. Samples of a
  version whose load or canary failed are answered with `SampleFailed`.
- Weight messages are handled one at a time, in the order in which they came; generation goes on beside them.

Consumes: the engine's messages. Waits for: the link and the backend. Ends when: `Stop` or `Session.request_stop`
(returns the reason), the engine is gone (`PeerLost`), or the backend is dead (`RunError`).
"""

import asyncio
import logging
import os
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

from engine.core.errors import RunError, WeightUpdateError, first_cause
from engine.transport.base import Link
from engine.wire import (
    PROTOCOL_VERSION,
    Abort,
    Applied,
    ApplyWeights,
    Encode,
    Encoded,
    Generate,
    Heartbeat,
    Hello,
    Int32s,
    Manifest,
    Message,
    SampleDone,
    SampleFailed,
    SampleKey,
    Staged,
    StageWeights,
    Stop,
    Welcome,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Time between heartbeats: well under the smallest sensible `worker.heartbeat_deadline_s`."""
DRAIN_DEADLINE_S = 5.0
"""Longest wait for aborted samples at `Stop`; a backend that needs longer is cancelled."""


@dataclass(frozen=True, slots=True)
class Load:
    """What loading a version cost."""

    pause_s: float
    """From asking generation to stop, the step under way included, until it goes on."""
    load_s: float
    """Time in which weights were replaced (part of the pause)."""
    canary_max_nats: float
    """Largest |own logprob - learner's logprob| over the manifest's canaries; nan or inf when one is not finite."""


class GenerationBackend(Protocol):
    """What generates: vLLM, or a simulation of it. Construction and tear-down belong to its owner."""

    async def encode(self, prompts: list[str], chat_template: bool) -> list[Int32s]:
        """Token ids of each prompt, wrapped as a user message where `chat_template`."""
        ...

    async def generate(self, request: Generate) -> SampleDone:
        """Draw one sample.

        Returns:
            The whole sample; after `abort` of its key the tokens so far with finish_reason "abort".

        Raises:
            RunError: the backend is dead (ends the conversation). Any other error fails only this sample.
        """
        ...

    async def abort(self, keys: list[SampleKey]) -> None:
        """Make the `generate` calls of these keys return soon; unknown keys (already done) are ignored."""
        ...

    async def stage(self, manifest: Manifest) -> None:
        """Check and take in new weights while generation goes on; replaces what was staged before.

        Raises:
            WeightUpdateError: a check failed; the weights in use are untouched.
        """
        ...

    async def apply(self, manifest: Manifest, load: bool) -> Load:
        """Let the staged weights draw, tag later tokens with `manifest.policy_version`, and ask the canaries.

        Args:
            manifest: What was staged.
            load: False when these weights are held already: then nothing is replaced.

        Raises:
            WeightUpdateError: the weights could not be loaded; what is held now is not to be trusted.
        """
        ...


def new_hello(name: str, slots: int, max_context_tokens: int) -> Hello:
    """A worker's first message: a new life that holds the initial weights."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        role="worker",
        name=name,
        life=secrets.token_hex(8),
        pid=os.getpid(),
        slots=slots,
        max_context_tokens=max_context_tokens,
    )


async def serve(link: Link, backend: GenerationBackend, heartbeat_s: float = HEARTBEAT_S) -> str:
    """Answer the engine until it says `Stop`; returns its reason. See `Session.run`."""
    return await Session(link, backend, heartbeat_s).run()


class Session:
    """One worker's conversation with the engine. The caller closes the link and the backend afterwards."""

    def __init__(self, link: Link, backend: GenerationBackend, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._link = link
        self._backend = backend
        self._heartbeat_s = heartbeat_s
        self._stopping = asyncio.Event()
        self.stop_reason = ""
        """Why it ends; empty while it goes on."""
        self._running: dict[SampleKey, asyncio.Task[None]] = {}
        self._tokens_generated = 0
        self._stage = "generating"
        self._updates = asyncio.Lock()
        self._staged: Manifest | None = None
        self._unverified: int | None = None
        self._held: list[SampleDone] = []
        self._refused: dict[int, str] = {}

    def request_stop(self, reason: str) -> None:
        """End as `Stop` would, e.g. from a signal handler."""
        self.stop_reason = self.stop_reason or reason
        self._stopping.set()

    async def run(self) -> str:
        """Serve until stopped.

        Returns:
            Why it ended.

        Raises:
            PeerLost: the engine is gone.
            RunError: the backend is dead.
            DeadlineError: the engine takes no more messages.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                heart = tasks.create_task(self._beat())
                receiver = tasks.create_task(self._receive(tasks))
                await self._stopping.wait()
                receiver.cancel()
                heart.cancel()
                await self._drain()
        except* Exception as group:
            raise first_cause(group) from group
        return self.stop_reason

    async def _drain(self) -> None:
        """Abort what runs and let it answer; cancel what does not within the deadline."""
        running = list(self._running.values())
        await self._backend.abort(list(self._running))
        if running:
            _, late = await asyncio.wait(running, timeout=DRAIN_DEADLINE_S)
            for task in late:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            await self._link.send(
                Heartbeat(in_flight=len(self._running), tokens_generated=self._tokens_generated, stage=self._stage)
            )
            await asyncio.sleep(self._heartbeat_s)

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            message = await self._link.receive()
            match message:
                case Generate():
                    if message.key in self._running:
                        log.warning("%s asked for twice at once; it is drawn once", message.key)
                        continue
                    self._running[message.key] = tasks.create_task(self._generate(message))
                case Abort():
                    await asyncio.sleep(0)  # a Generate that came just before gets its first turn, so it can be found
                    await self._backend.abort(message.keys)
                case Encode():
                    tasks.create_task(self._encode(message))
                case StageWeights():
                    tasks.create_task(self._stage_weights(message))
                case ApplyWeights():
                    tasks.create_task(self._apply_weights(message))
                case Stop():
                    self.request_stop(message.reason)
                    return
                case Welcome():
                    continue
                case _:
                    log.warning("%s is no message for a worker", type(message).__name__)

    async def _encode(self, message: Encode) -> None:
        token_ids = await self._backend.encode(message.prompts, message.chat_template)
        await self._link.send(Encoded(request=message.request, token_ids=token_ids))

    async def _generate(self, message: Generate) -> None:
        answer: Message
        try:
            answer = await self._backend.generate(message)
        except RunError:
            raise
        except Exception as exc:  # the per-sample boundary: one bad request must not end the others
            log.exception("sample %s failed", message.key)
            answer = SampleFailed(key=message.key, error=f"{type(exc).__name__}: {exc}")
        finally:
            self._running.pop(message.key, None)
        if isinstance(answer, SampleDone):
            self._tokens_generated += len(answer.token_ids)
            if any(span.version == self._unverified for span in answer.spans):
                self._held.append(answer)
                return
        await self._link.send(self._checked(answer))

    def _checked(self, answer: Message) -> Message:
        """The answer itself, or a failure where it has tokens of refused weights."""
        if isinstance(answer, SampleDone):
            for span in answer.spans:
                if span.version in self._refused:
                    error = f"drawn from version {span.version}, which failed: {self._refused[span.version]}"
                    return SampleFailed(key=answer.key, error=error, tokens_lost=len(answer.token_ids))
        return answer

    async def _stage_weights(self, message: StageWeights) -> None:
        async with self._updates:
            version = message.manifest.policy_version
            self._stage = f"staging weights of version {version}"
            began_at = time.monotonic()
            error = ""
            try:
                await self._backend.stage(message.manifest)
                self._staged = message.manifest
            except WeightUpdateError as exc:
                self._staged = None
                error = str(exc)
                log.warning("weights of version %d refused: %s", version, exc)
            self._stage = "generating"
            stage_s = time.monotonic() - began_at
            await self._link.send(Staged(policy_version=version, error=error, stage_s=stage_s))

    async def _apply_weights(self, message: ApplyWeights) -> None:
        async with self._updates:
            version = message.policy_version
            self._stage = f"applying weights of version {version}"
            applied = await self._apply(message)
            self._stage = "generating"
            if applied.error:
                log.error("weights of version %d failed: %s", version, applied.error)
            await self._link.send(applied)
            held, self._held = self._held, []
            for sample in held:
                await self._link.send(self._checked(sample))

    async def _apply(self, message: ApplyWeights) -> Applied:
        version = message.policy_version
        manifest = self._staged
        if manifest is None or manifest.policy_version != version:
            held = "nothing" if manifest is None else f"version {manifest.policy_version}"
            return Applied(policy_version=version, error=f"version {version} must be staged first, staged is {held}")
        began_at = time.monotonic()
        load, error = Load(0.0, 0.0, 0.0), ""
        self._refused.pop(version, None)
        self._unverified = version if message.load else None
        try:
            load = await self._backend.apply(manifest, message.load)
            worst, limit = load.canary_max_nats, message.canary_limit_nats
            if not worst <= limit:  # nan fails too
                error = f"canary logprobs must be within {limit:.4g} nats, got {worst:.4g}"
        except WeightUpdateError as exc:
            error = str(exc)
        finally:
            self._unverified = None
        if error:
            self._refused[version] = error
        return Applied(
            policy_version=version,
            error=error,
            pause_s=load.pause_s,
            load_s=load.load_s,
            update_s=time.monotonic() - began_at,
            canary_max_nats=load.canary_max_nats,
        )
