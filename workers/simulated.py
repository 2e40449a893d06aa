"""The simulated worker: real wire, real clock of its loop, and responses drawn from `SimulatedLaw`.

Invariants: a request's result depends only on its prompt and seed (see the law); its duration is tokens over
`simulated.tokens_per_s`, in loop time, so it runs under a virtual clock too; tokens after an applied update carry the
new version; an aborted request answers with the tokens it had. Needs neither torch nor vLLM.

Run as `python -m workers.simulated --connect ADDR --name N --config PATH [--set section.key=value ...]`.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop

from configs import Config, load_config
from configs.load import ConfigError
from configs.processes import Simulated
from engine.core.errors import AdastreamError, WeightUpdateError
from engine.transport.zmq import ZmqLink
from engine.wire import Generate, Int32s, Manifest, SampleDone, SampleKey, Span
from workers.generation import Load, Session, new_hello
from workers.simulated_law import Draw, SimulatedLaw, encode_text, response_text

log = logging.getLogger(__name__)

LOGPROB = -1.0
"""Behaviour logprob of every simulated token, nats."""


class SimulatedFailure(AdastreamError):
    """A request that was drawn to fail."""


@dataclass(slots=True)
class _Running:
    """A request under way: when it began and which version sampled it from which token on."""

    began_at: float
    num_tokens: int
    ended: asyncio.Future[bool]
    """True = aborted."""
    changes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(first token, version), oldest first."""


class SimulatedWorker:
    """A `GenerationBackend` without a model.

    Example: `SimulatedWorker(Simulated(tokens_per_s=1000.0), seed=0)` answers a 64-token draw after 0.064 s.
    """

    def __init__(self, config: Simulated, seed: int, policy_version: int = 0) -> None:
        self.law = SimulatedLaw(config, seed)
        self._tokens_per_s = config.tokens_per_s
        self._version = policy_version
        self._running: dict[SampleKey, _Running] = {}

    async def encode(self, prompts: list[str], chat_template: bool) -> list[Int32s]:
        """One id a UTF-8 byte; the simulation has no chat template."""
        return [encode_text(prompt) for prompt in prompts]

    async def generate(self, request: Generate) -> SampleDone:
        """Take as long as the draw says, then answer.

        Raises:
            SimulatedFailure: the request was drawn to fail.
        """
        loop = asyncio.get_running_loop()
        draw = self.law.draw(request.prompt_token_ids, request.params, request.key.retry)
        num_tokens = min(draw.num_tokens, request.params.max_tokens)
        running = _Running(loop.time(), num_tokens, loop.create_future(), [(0, self._version)])
        share = 1.0 if draw.fails_after is None else draw.fails_after
        timer = loop.call_later(share * num_tokens / self._tokens_per_s, _end, running.ended, False)
        self._running[request.key] = running
        try:
            is_aborted = await running.ended
        finally:
            timer.cancel()
            del self._running[request.key]
        if not is_aborted and draw.fails_after is not None:
            raise SimulatedFailure(f"drawn to fail after {self._tokens_so_far(running)} of {num_tokens} tokens")
        return self._answer(request, draw, running, is_aborted)

    async def abort(self, keys: list[SampleKey]) -> None:
        """End these requests now."""
        for key in keys:
            if key in self._running:
                _end(self._running[key].ended, True)

    async def stage(self, manifest: Manifest) -> None:
        """Only simulated weights, which have no tensors.

        Raises:
            WeightUpdateError: the manifest names real ones.
        """
        if manifest.mover != "none" or manifest.tensors or manifest.canaries:
            raise WeightUpdateError(f"a simulated worker takes weights without tensors, got mover {manifest.mover!r}")

    async def apply(self, manifest: Manifest, load: bool) -> Load:
        """Tag every token from now on with the new version."""
        self._version = manifest.policy_version
        for running in self._running.values():
            running.changes.append((self._tokens_so_far(running), self._version))
        return Load(pause_s=0.0, load_s=0.0, canary_max_nats=0.0)  # no model, no difference

    def _tokens_so_far(self, running: _Running) -> int:
        elapsed_s = asyncio.get_running_loop().time() - running.began_at
        return min(running.num_tokens, int(elapsed_s * self._tokens_per_s))

    def _answer(self, request: Generate, draw: Draw, running: _Running, is_aborted: bool) -> SampleDone:
        num_tokens = self._tokens_so_far(running) if is_aborted else running.num_tokens
        is_cut = draw.num_tokens > request.params.max_tokens
        return SampleDone(
            key=request.key,
            token_ids=np.arange(num_tokens, dtype=np.int32),
            logprobs=np.full(num_tokens, LOGPROB, dtype=np.float32),
            spans=_spans(running.changes, num_tokens),
            text="" if is_aborted else response_text(request.prompt_token_ids, draw.is_right),
            finish_reason="abort" if is_aborted else "length" if is_cut else "stop",
            generation_s=asyncio.get_running_loop().time() - running.began_at,
        )


def _end(ended: asyncio.Future[bool], is_aborted: bool) -> None:
    if not ended.done():
        ended.set_result(is_aborted)


def _spans(changes: list[tuple[int, int]], num_tokens: int) -> list[Span]:
    """Cover [0, num_tokens) without gaps; a version that sampled no token has no span."""
    ends = [*(start for start, _ in changes[1:]), num_tokens]
    return [
        Span(version, start, min(end, num_tokens))
        for (start, version), end in zip(changes, ends, strict=True)
        if start < min(end, num_tokens)
    ]


async def run(address: str, name: str, config: Config) -> None:
    """Serve the engine at `address` until it says stop. Raises as `Session.run` and `ZmqLink.connect` do."""
    hello = new_hello(name, config.worker.slots, config.model.max_context_tokens)
    link = await ZmqLink.connect(address, hello)
    try:
        session = Session(link, SimulatedWorker(config.simulated, config.run.seed))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, session.request_stop, "SIGTERM")
        log.info("worker %s ends: %s", name, await session.run())
    finally:
        await link.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, build, run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers.simulated", description="A worker without a model.")
    parser.add_argument("--connect", required=True, metavar="ADDR", help="the engine, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--name", default="worker-0", help="unique among the engine's workers")
    parser.add_argument("--config", type=Path, required=True, metavar="PATH")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the engine says stop
    try:
        uvloop.run(run(options.connect, options.name, load_config(options.config, options.overrides)))
    except (AdastreamError, ConfigError) as exc:
        log.error("worker %s failed: %s: %s", options.name, type(exc).__name__, exc)  # noqa: TRY400  (the text says it)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
