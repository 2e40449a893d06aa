"""The simulated worker and learner as the real processes that the engine starts, its end played by the test."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from configs.load import load_config
from engine.transport.base import PeerJoined, Received
from engine.transport.zmq import ZmqHub
from engine.wire import (
    Abort,
    Applied,
    ApplyWeights,
    Encode,
    Encoded,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Int32s,
    Manifest,
    Message,
    SampleDone,
    SampleKey,
    SamplingParams,
    Staged,
    StageWeights,
    Stop,
    WeightsReady,
)
from workers.simulated_law import SimulatedLaw

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "sim.toml"
DEADLINE_S = 40.0


async def _next(hub: ZmqHub) -> Message:
    """The next message that is no heartbeat; a joining peer counts as its hello."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            match await hub.receive():
                case PeerJoined(hello=hello):
                    return hello
                case Received(message=message) if not isinstance(message, Heartbeat):
                    return message
                case Received():
                    continue
                case gone:
                    pytest.fail(f"a peer went away: {gone}")


@asynccontextmanager
async def _peer(module: str, *arguments: str) -> AsyncIterator[tuple[ZmqHub, Hello, asyncio.subprocess.Process]]:
    hub = await ZmqHub.bind("127.0.0.1", 0)
    command = ["-m", module, "--connect", hub.address, "--config", str(CONFIG), *arguments]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT)
    try:
        hello = await _next(hub)
        assert isinstance(hello, Hello)
        assert hello.pid == process.pid
        yield hub, hello, process
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await hub.close()


def _request(index: int, prompt: Int32s) -> Generate:
    params = SamplingParams(max_tokens=512, temperature=1.0, top_p=1.0, seed=1000 + index)
    return Generate(key=SampleKey(0, index), prompt_token_ids=prompt, params=params)


async def test_a_worker_encodes_generates_updates_and_stops():
    async with _peer("workers.simulated", "--name", "w", "--set", "simulated.tokens_per_s=1e6") as (hub, hello, _):
        assert (hello.role, hello.name, hello.slots) == ("worker", "w", 64)
        await hub.send("w", Encode(request=1, prompts=["Reply with 7."], chat_template=True))
        encoded = await _next(hub)
        assert isinstance(encoded, Encoded)
        (prompt,) = encoded.token_ids

        config = load_config(CONFIG)
        law = SimulatedLaw(config.simulated, config.run.seed)
        for index in range(100):
            await hub.send("w", _request(index, prompt))
        done = [message for _ in range(100) if isinstance(message := await _next(hub), SampleDone)]
        assert len(done) == 100
        for sample in done:
            draw = law.draw(prompt, _request(sample.key.index, prompt).params)
            assert len(sample.token_ids) == min(512, draw.num_tokens)
            assert sample.text == ("7" if draw.is_right else "wrong")

        manifest = Manifest(policy_version=1, mover="none", location="", num_bytes=0, tensors=[], canaries=[])
        await hub.send("w", StageWeights(manifest=manifest))
        staged = await _next(hub)
        assert isinstance(staged, Staged)
        assert staged.error == ""
        await hub.send("w", ApplyWeights(policy_version=1))
        applied = await _next(hub)
        assert isinstance(applied, Applied)
        assert (applied.policy_version, applied.error) == (1, "")
        await hub.send("w", _request(0, prompt))
        again = await _next(hub)
        assert isinstance(again, SampleDone)
        assert [span.version for span in again.spans] == [1]
        await hub.send("w", Stop(reason="enough"))


async def test_a_worker_aborts_and_ends_when_asked_to_terminate():
    async with _peer("workers.simulated", "--name", "w", "--set", "simulated.tokens_per_s=0.5") as (hub, _, process):
        await hub.send("w", Encode(request=1, prompts=["x"], chat_template=False))
        encoded = await _next(hub)
        assert isinstance(encoded, Encoded)
        for index in range(2):
            await hub.send("w", _request(index, encoded.token_ids[0]))
        await hub.send("w", Encode(request=2, prompts=["x"], chat_template=False))
        await _next(hub)  # both are under way now
        await hub.send("w", Abort(keys=[SampleKey(0, 0)]))
        first = await _next(hub)
        process.terminate()
        second = await _next(hub)
        for index, sample in enumerate((first, second)):
            assert isinstance(sample, SampleDone)
            assert (sample.key.index, sample.finish_reason) == (index, "abort")


async def test_a_learner_offers_its_weights_and_stops(tmp_path):
    async with _peer("learner.simulated", "--run-folder", str(tmp_path)) as (hub, hello, _):
        assert (hello.role, hello.slots) == ("learner", 0)
        ready = await _next(hub)
        assert isinstance(ready, WeightsReady)
        assert ready.manifest.policy_version == 0
        await hub.send(hello.name, Stop(reason="enough"))
        assert isinstance(await _next(hub), Finished)


@pytest.mark.parametrize("module", ["workers.simulated", "learner.simulated"])
async def test_a_bad_key_is_one_clear_line_and_exit_code_1(module, tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, "--connect", "tcp://127.0.0.1:1", "--config", str(CONFIG), "--set", "run.sed=1",
        *(["--run-folder", str(tmp_path)] if module == "learner.simulated" else []),
        cwd=ROOT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert "did you mean 'seed'" in err.decode()
    assert "Traceback" not in err.decode()
