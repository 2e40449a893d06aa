"""What the wire costs generation: tokens/s of a bare AsyncLLM against the same requests through a worker's session.

Both phases drive the same vLLM with the same requests (same prompts, same seeds, so the same tokens), `--slots` in
flight, in turns; medians over the turns. The engine's part is played by a hub in a thread of its own.
Run: `python benchmarks/generation.py --config configs/quickstart.toml --cores 0`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from configs import Config, load_config
from engine.transport.base import Received
from engine.transport.zmq import ZmqHub, ZmqLink
from engine.wire import Generate, Int32s, SampleDone, SampleKey, SamplingParams, Stop
from workers.generation import Session, new_hello
from workers.vllm import set_environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
DEADLINE_S = 600.0


def requests(config: Config, prompts: Sequence[Int32s], count: int, turn: int, phase: int) -> Iterator[Generate]:
    """`count` requests; the same prompts and seeds in every turn, keys of their own."""
    for index in range(count):
        params = SamplingParams(
            max_tokens=config.sampling.max_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            seed=index,
        )
        key = SampleKey(2 * turn + phase, index)
        yield Generate(key=key, prompt_token_ids=prompts[index % len(prompts)], params=params)


async def bare(llm: "AsyncLLM", work: Iterator[Generate], slots: int) -> int:
    """Drive AsyncLLM itself; tokens generated."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    tokens = 0

    async def slot() -> None:
        nonlocal tokens
        for request in work:
            params = VllmParams(
                max_tokens=request.params.max_tokens,
                temperature=request.params.temperature,
                top_p=request.params.top_p,
                seed=request.params.seed,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            name = f"bare-{request.key.arm}-{request.key.index}"
            async for output in llm.generate(tokens_input(request.prompt_token_ids.tolist()), params, name):
                tokens += len(output.outputs[0].token_ids)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(slots):
            tasks.create_task(slot())
    return tokens


async def through_hub(hub: ZmqHub, peer: str, work: Iterator[Generate], slots: int) -> int:
    """Drive the worker over the wire; tokens generated."""
    tokens = in_flight = 0
    for request in work:
        await hub.send(peer, request)
        in_flight += 1
        if in_flight == slots:
            break
    while in_flight:
        event = await hub.receive()
        if isinstance(event, Received) and isinstance(event.message, SampleDone):
            tokens += len(event.message.token_ids)
            in_flight -= 1
            following = next(work, None)
            if following is not None:
                await hub.send(peer, following)
                in_flight += 1
    return tokens


class HubThread:
    """A hub with a loop and a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the hub's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)


async def measure(config: Config, turns: int, count: int) -> dict[str, Any]:
    """Both phases in turns."""
    from workers.vllm_backend import VllmBackend

    booting_at = time.perf_counter()
    backend = await VllmBackend.start(config)
    llm = backend.llm
    boot_s = time.perf_counter() - booting_at
    thread = HubThread()
    hub = await thread.call(ZmqHub.bind("127.0.0.1", 0))
    slots = config.worker.slots
    link = await ZmqLink.connect(hub.address, new_hello("worker-0", slots, config.model.max_context_tokens))
    session = asyncio.ensure_future(Session(link, backend).run())
    await thread.call(hub.receive())  # it joined
    rng = np.random.default_rng(0)
    texts = [f"What is {a} + {b}? Answer with the number only." for a, b in rng.integers(10, 99, (slots // 4 or 1, 2))]
    prompts = await backend.encode(texts, config.model.chat_template)
    await bare(llm, requests(config, prompts, slots, turns, 0), slots)  # warm-up
    rates: dict[str, list[float]] = {"bare": [], "session": []}
    samples: list[float] = []
    for turn in range(turns):
        for phase, name in enumerate(rates):
            work = requests(config, prompts, count, turn, phase)
            began_at = time.perf_counter()
            if name == "bare":
                tokens = await bare(llm, work, slots)
            else:
                tokens = await thread.call(through_hub(hub, "worker-0", work, slots))
                samples.append(count / (time.perf_counter() - began_at))
            rates[name].append(tokens / (time.perf_counter() - began_at))
    await thread.call(hub.send("worker-0", Stop(reason="measured")))
    await session
    await link.close()
    await thread.call(hub.close())
    thread.stop()
    backend.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "slots": slots,
        "boot_s": round(boot_s, 1),
        "bare_tokens_per_s": [round(value, 1) for value in rates["bare"]],
        "session_tokens_per_s": [round(value, 1) for value in rates["session"]],
        "session_samples_per_s": round(statistics.median(samples), 2),
        "ratio": round(medians["session"] / medians["bare"], 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one JSON object; 1 when the wire costs more than `--floor` allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--cores", default="0")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=192, help="a turn and phase")
    parser.add_argument("--floor", type=float, default=0.95)
    options = parser.parse_args(argv)
    config = load_config(options.config, options.overrides)
    set_environment(config, [int(core) for core in options.cores.split(",") if core])

    async def bounded() -> dict[str, Any]:
        async with asyncio.timeout(DEADLINE_S):
            return await measure(config, options.turns, options.requests)

    result = asyncio.run(bounded())
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if result["ratio"] >= options.floor else 1


if __name__ == "__main__":
    sys.exit(main())
