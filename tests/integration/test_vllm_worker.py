"""The real generation worker: a process of its own, a real vLLM, tiny random models, the real wire.

One worker serves a whole story, because its start takes some 15 s.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from engine.wire import (
    Abort,
    Applied,
    ApplyWeights,
    Canary,
    Encode,
    Encoded,
    Generate,
    Int32s,
    Manifest,
    SampleDone,
    SampleFailed,
    SampleKey,
    SamplingParams,
    Staged,
    StageWeights,
    Stop,
)
from learner.publish import SegmentPublisher
from tests.support.tiny_model import logprobs_of, named_weights, perturb, save_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TEMPERATURE = 0.7


def write_config(folder: Path, model: Path, dtype: str, is_buffered: bool = True) -> Path:
    path = folder / "config.toml"
    path.write_text(
        f'[run]\nmax_steps = 1\n[model]\npath = "{model}"\nmax_context_tokens = 160\n'
        f'[worker]\nslots = 8\ndtype = "{dtype}"\nkv_cache_bytes = 33554432\n'
        f"[weights]\nbuffered = {str(is_buffered).lower()}\n"
    )
    return path


def request(index: int, prompt: Int32s, max_tokens: int = 12, seed: int = 0, retry: int = 0) -> Generate:
    params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, top_p=1.0, seed=seed)
    return Generate(key=SampleKey(0, index, retry), prompt_token_ids=prompt, params=params)


def canaries(model: torch.nn.Module, prompts: list[Int32s]) -> list[Canary]:
    return [Canary(ids, logprobs_of(model, ids.tolist()).numpy().astype(np.float32)) for ids in prompts]


def difference(model: torch.nn.Module, prompt: Int32s, answer: SampleDone) -> float:
    """Largest |behaviour logprob - plain forward|, nats."""
    whole = [*prompt.tolist(), *answer.token_ids.tolist()]
    expected = logprobs_of(model, whole, TEMPERATURE)[len(prompt) - 1 :].numpy()
    return float(np.abs(expected - answer.logprobs).max())


async def update(worker: WorkerProcess, manifest: Manifest, limit: float, load: bool = True) -> Applied:
    await worker.tell(StageWeights(manifest=manifest))
    staged = await worker.hear(Staged)
    assert staged.error == ""
    await worker.tell(
        ApplyWeights(policy_version=manifest.policy_version, load=load, canary_limit_nats=limit),
    )
    return await worker.hear(Applied)


async def encode(worker: WorkerProcess, *prompts: str) -> list[Int32s]:
    await worker.tell(Encode(request=1, prompts=list(prompts), chat_template=True))
    return (await worker.hear(Encoded)).token_ids


async def draw(worker: WorkerProcess, *requests: Generate) -> dict[int, SampleDone]:
    await worker.tell(*requests)
    answers = [await worker.hear(SampleDone) for _ in requests]
    return {answer.key.index: answer for answer in answers}


async def test_bf16_tied_model_from_hello_to_stop(tmp_path: Path) -> None:
    noise = 0.2  # nats, bf16: more than twice what two implementations of the same weights differ by (0.05 to 0.08)
    folder = tmp_path / "model"
    model = save_tiny_model(folder, is_tied=True, dtype=torch.bfloat16)
    config = write_config(tmp_path, folder, "bfloat16")
    with SegmentPublisher() as publisher:
        async with running_worker("workers.vllm", config, tmp_path / "log", "--cores", "0") as worker:
            assert (worker.joined.hello.slots, worker.joined.hello.max_context_tokens) == (8, 160)
            first, second = await encode(worker, "1 + 1?", "Count to a very large number, please.")
            assert first.tolist()[:2] == [1, first[1]]
            await check_sampling(worker, model, first, noise)
            await check_abort(worker, second)

            manifest = publisher.lay_out(0, named_weights(model), canaries(model, [first, second]))
            lag0 = await update(worker, manifest, limit=noise, load=False)
            assert lag0.error == ""
            assert lag0.pause_s == 0.0

            perturb(model, seed=1)
            manifest = publisher.lay_out(1, named_weights(model), canaries(model, [first, second]))
            await check_refusals(worker, manifest, first)
            await check_staged_weights_wait(worker, manifest, first)
            await check_update_in_flight(worker, model, manifest, second, noise)

            perturb(model, seed=2)
            lying = canaries(model, [first, second])  # of other weights than those that are sent
            manifest = publisher.lay_out(2, named_weights(save_tiny_model(tmp_path / "other", is_tied=True,
                                         dtype=torch.bfloat16, seed=9)), lying)  # fmt: skip
            applied = await update(worker, manifest, limit=noise)
            assert "canary logprobs must be within" in applied.error
            await worker.tell(request(90, first))
            failed = await worker.hear(SampleFailed)
            assert "version 2" in failed.error

            family = worker.family()
            await worker.tell(Stop(reason="done"))
            async with asyncio.timeout(30):
                assert await worker.process.wait() == 0
            _, alive = psutil.wait_procs(family[1:], timeout=5)
            assert alive == []


async def check_sampling(worker: WorkerProcess, model: torch.nn.Module, prompt: Int32s, noise: float) -> None:
    """Same seed, same tokens; logprobs are those of the tempered distribution; the answer is whole.

    Beside seeded samples a greedy response does not depend on its seed.
    """
    greedy = [request(index, prompt, seed=index) for index in (4, 5)]
    for one in greedy:
        one.params = SamplingParams(one.params.max_tokens, temperature=0.0, top_p=1.0, seed=one.params.seed)
    drawn = await draw(
        worker, request(1, prompt, seed=5), request(2, prompt, seed=5, retry=1), request(3, prompt, seed=6), *greedy
    )
    first, second = drawn.pop(4), drawn.pop(5)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert np.isfinite(first.logprobs).all()
    assert len(first.token_ids) == first.spans[-1].end
    assert drawn[1].token_ids.tolist() == drawn[2].token_ids.tolist()
    assert drawn[1].token_ids.tolist() != drawn[3].token_ids.tolist()
    for answer in drawn.values():
        assert difference(model, prompt, answer) < noise
        assert [(span.version, span.start, span.end) for span in answer.spans] == [(0, 0, len(answer.token_ids))]
        assert "<|" not in answer.text
        assert answer.generation_s > 0
    too_long = np.zeros(200, np.int32)
    await worker.tell(request(4, too_long))
    assert (await worker.hear(SampleFailed)).key.index == 4


async def check_abort(worker: WorkerProcess, prompt: Int32s) -> None:
    """Aborted right away or under way: one answer, with the tokens so far."""
    await worker.tell(request(10, prompt, max_tokens=100), Abort(keys=[SampleKey(0, 10)]))
    answer = await worker.hear(SampleDone)
    assert answer.finish_reason == "abort"
    assert len(answer.token_ids) == len(answer.logprobs) < 100


async def check_refusals(worker: WorkerProcess, good: Manifest, prompt: Int32s) -> None:
    """Bad weights are refused while staging, and generation goes on with the old ones."""
    specs = good.tensors
    bad = {
        "tensors are missing": specs[1:],
        "must be finite": [msgspec.structs.replace(specs[0], is_finite=False), *specs[1:]],
        "must have shape": [msgspec.structs.replace(specs[0], shape=[1, 1]), *specs[1:]],
        "must have xxh3": [msgspec.structs.replace(specs[0], xxh3="0"), *specs[1:]],
        "unknown to the model": [*specs, msgspec.structs.replace(specs[0], name="model.extra")],
    }
    for message, tensors in bad.items():
        await worker.tell(StageWeights(manifest=msgspec.structs.replace(good, tensors=tensors)))
        assert message in (await worker.hear(Staged)).error
        await worker.tell(ApplyWeights(policy_version=good.policy_version))
        assert "must be staged first" in (await worker.hear(Applied)).error
    drawn = await draw(worker, request(20, prompt))
    assert drawn[20].spans[0].version == 0


async def check_staged_weights_wait(worker: WorkerProcess, manifest: Manifest, prompt: Int32s) -> None:
    """What is staged, even twice, is whole in vLLM's process, but draws nothing before it is applied."""
    before = (await draw(worker, request(25, prompt, seed=5)))[25]
    for _ in range(2):
        await worker.tell(StageWeights(manifest=manifest))
        assert (await worker.hear(Staged)).error == ""
    after = (await draw(worker, request(26, prompt, seed=5)))[26]
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()
    assert [span.version for span in after.spans] == [0]


async def check_update_in_flight(
    worker: WorkerProcess, model: torch.nn.Module, manifest: Manifest, prompt: Int32s, noise: float
) -> None:
    """Requests live through an update; what is drawn afterwards is the new model's."""
    await worker.tell(*(request(30 + index, prompt, max_tokens=100, seed=index) for index in range(8)))
    applied = await update(worker, manifest, limit=noise)
    assert applied.error == ""
    assert 0 < applied.load_s < applied.pause_s < applied.update_s
    answers = [await worker.hear(SampleDone) for _ in range(8)]
    mixed = [answer for answer in answers if {span.version for span in answer.spans} == {0, 1}]
    assert mixed
    for answer in mixed:
        start = answer.spans[1].start
        whole = [*prompt.tolist(), *answer.token_ids.tolist()]
        expected = logprobs_of(model, whole, TEMPERATURE)[len(prompt) - 1 :].numpy()
        assert np.abs(expected - answer.logprobs)[start:].max() < noise
        assert np.abs(expected - answer.logprobs)[:start].max() > noise
    drawn = await draw(worker, request(40, prompt))
    assert drawn[40].spans[0].version == 1
    assert difference(model, prompt, drawn[40]) < noise


@pytest.mark.parametrize("is_buffered", [True, False])
async def test_fp32_untied_model_is_updated_and_a_killed_worker_leaves_nothing(
    tmp_path: Path, is_buffered: bool
) -> None:
    noise = 0.01
    folder = tmp_path / "model"
    model = save_tiny_model(folder, is_tied=False, dtype=torch.float32)
    config = write_config(tmp_path, folder, "float32", is_buffered)
    with SegmentPublisher() as publisher:
        async with running_worker("workers.vllm", config, tmp_path / "log", "--cores", "0") as worker:
            (prompt,) = await encode(worker, "2 + 2?")
            for version in (1, 2, 3):
                perturb(model, seed=version)
                manifest = publisher.lay_out(version, named_weights(model), canaries(model, [prompt]))
                applied = await update(worker, manifest, limit=noise)
                assert applied.error == ""
                drawn = await draw(worker, request(version, prompt, seed=version))
                assert difference(model, prompt, drawn[version]) < noise
                assert drawn[version].spans[0].version == version
            family = worker.family()
            assert len(family) >= 3
            worker.process.kill()
            _, alive = await asyncio.to_thread(psutil.wait_procs, family[1:], 10)
            assert alive == []


async def test_a_dead_vllm_ends_the_worker_with_its_cause(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny_model(folder, is_tied=True, dtype=torch.float32)
    config = write_config(tmp_path, folder, "float32")
    async with running_worker("workers.vllm", config, tmp_path / "log", "--cores", "0") as worker:
        children = worker.family()[1:]
        core = next(child for child in children if "EngineCore" in "".join(child.cmdline()))
        core.kill()
        async with asyncio.timeout(30):
            assert await worker.process.wait() == 1
        assert "vLLM's engine process died" in (tmp_path / "log").read_text()
