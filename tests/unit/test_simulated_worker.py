"""The simulated worker: its laws hold, and order, worker and concurrency change nothing."""

import asyncio
import math
import random
import statistics

import numpy as np
import pytest

from configs.processes import Simulated
from engine.core.errors import WeightUpdateError
from engine.wire import Generate, Manifest, SampleDone, SampleKey, SamplingParams, Span
from tests.support.virtual_loop import run
from workers.simulated import SimulatedFailure, SimulatedWorker
from workers.simulated_law import TIERS, SimulatedLaw, decode_text, encode_text, response_text

PROMPT = encode_text("Reply with 7.")


def params(seed: int = 0, temperature: float = 1.0, max_tokens: int = 100_000) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=1.0, seed=seed)


def request(index: int, seed: int | None = None, max_tokens: int = 100_000, retry: int = 0) -> Generate:
    key = SampleKey(arm=0, index=index, retry=retry)
    return Generate(
        key=key, prompt_token_ids=PROMPT, params=params(index if seed is None else seed, max_tokens=max_tokens)
    )


def manifest(version: int, mover: str = "none") -> Manifest:
    return Manifest(policy_version=version, mover=mover, location="", num_bytes=0, tensors=[], canaries=[])


def within_three_errors(values: list[float], expected: float) -> bool:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return abs(statistics.fmean(values) - expected) <= 3.0 * error


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_labels_have_the_pass_rate(p):
    law = SimulatedLaw(Simulated(pass_rate=(p,)), seed=1)
    labels = [float(law.draw(PROMPT, params(seed)).is_right) for seed in range(20_000)]
    assert within_three_errors(labels, p)


@pytest.mark.parametrize("is_right", [True, False])
def test_lengths_have_the_mean_of_their_label(is_right):
    config = Simulated(pass_rate=(0.5,), tokens_mean=64.0, tokens_sigma=0.8, length_ratio_wrong=2.0)
    law = SimulatedLaw(config, seed=2)
    draws = [law.draw(PROMPT, params(seed)) for seed in range(40_000)]
    lengths = [float(draw.num_tokens) for draw in draws if draw.is_right == is_right]
    assert within_three_errors(lengths, 64.0 if is_right else 128.0)
    assert law.mean_tokens(is_right) == (64.0 if is_right else 128.0)
    logs = [math.log(length) for length in lengths]
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.03)


def test_the_length_law_can_fail_its_check():
    law = SimulatedLaw(Simulated(pass_rate=(1.0,), tokens_mean=64.0), seed=2)
    lengths = [float(law.draw(PROMPT, params(seed)).num_tokens) for seed in range(40_000)]
    assert not within_three_errors(lengths, 66.0)


def test_prompts_fall_into_the_tiers_by_their_shares():
    law = SimulatedLaw(Simulated(), seed=3)
    rates = [law.pass_rate(encode_text(f"prompt {i}")) for i in range(20_000)]
    total = sum(share for share, _, _ in TIERS)
    for share, lowest, highest in TIERS:
        inside = [float(lowest <= rate < highest) for rate in rates]
        assert within_three_errors(inside, share / total)
        assert within_three_errors([rate for rate in rates if lowest <= rate < highest], (lowest + highest) / 2)


def test_listed_pass_rates_are_drawn_evenly_by_prompt():
    law = SimulatedLaw(Simulated(pass_rate=(0.2, 0.6)), seed=3)
    rates = [law.pass_rate(encode_text(f"prompt {i}")) for i in range(5_000)]
    assert set(rates) == {0.2, 0.6}
    assert within_three_errors([float(rate == 0.2) for rate in rates], 0.5)


def test_another_seed_makes_another_world():
    prompts = [encode_text(f"prompt {i}") for i in range(50)]
    one, other = (SimulatedLaw(Simulated(), seed=seed) for seed in (1, 2))
    assert [one.pass_rate(p) for p in prompts] != [other.pass_rate(p) for p in prompts]
    assert [one.pass_rate(p) for p in prompts] == [SimulatedLaw(Simulated(), seed=1).pass_rate(p) for p in prompts]


def test_greedy_labels_say_whether_the_pass_rate_is_above_one_half():
    law = SimulatedLaw(Simulated(pass_rate=(0.4, 0.6)), seed=4)
    for i in range(50):
        prompt = encode_text(f"prompt {i}")
        draws = {law.draw(prompt, params(seed, temperature=0.0)) for seed in range(5)}
        assert len(draws) == 1
        assert draws.pop().is_right == (law.pass_rate(prompt) > 0.5)


def test_failures_have_their_rate_and_a_retry_keeps_label_and_length():
    law = SimulatedLaw(Simulated(failure_rate=0.2), seed=5)
    first = [law.draw(PROMPT, params(seed)) for seed in range(10_000)]
    again = [law.draw(PROMPT, params(seed), retry=1) for seed in range(10_000)]
    fails = [draw.fails_after is not None for draw in first]
    assert within_three_errors([float(failed) for failed in fails], 0.2)
    assert within_three_errors([float(d.fails_after is not None) for d, f in zip(again, fails, strict=True) if f], 0.2)
    assert [(d.is_right, d.num_tokens) for d in first] == [(d.is_right, d.num_tokens) for d in again]


def test_texts_are_their_bytes():
    assert decode_text(encode_text("Grüße 7")) == "Grüße 7"
    assert encode_text("Grüße").dtype == np.int32
    assert decode_text(np.array([300, -1, 65], dtype=np.int32)).endswith("A")


def test_a_right_response_does_what_the_prompt_asks():
    assert response_text(PROMPT, is_right=True) == "7"
    assert response_text(encode_text("1 + 1 ="), is_right=True) == "right"
    assert response_text(PROMPT, is_right=False) == "wrong"


def what(sample: SampleDone) -> tuple[int, str, int, str]:
    return sample.key.index, sample.text, len(sample.token_ids), sample.finish_reason


async def draw_all(order: list[int], at_once: int) -> dict[int, tuple[int, str, int, str]]:
    worker = SimulatedWorker(Simulated(pass_rate=(0.3,)), seed=6)
    limit = asyncio.Semaphore(at_once)

    async def one(index: int) -> tuple[int, str, int, str]:
        async with limit:
            return what(await worker.generate(request(index)))

    async with asyncio.TaskGroup() as tasks:
        drawn = [tasks.create_task(one(index)) for index in order]
    return {task.result()[0]: task.result() for task in drawn}


def test_order_and_concurrency_do_not_change_results():
    order = list(range(200))
    shuffled = random.Random(0).sample(order, len(order))
    one_by_one = run(draw_all(order, 1))
    assert run(draw_all(shuffled, 64)) == one_by_one
    assert run(draw_all(shuffled[::-1], 3)) == one_by_one


def test_a_sample_takes_its_tokens_time_and_is_whole():
    async def scenario() -> None:
        worker = SimulatedWorker(Simulated(tokens_per_s=100.0), seed=0)
        sample = await worker.generate(request(0))
        tokens = len(sample.token_ids)
        assert asyncio.get_running_loop().time() == pytest.approx(tokens / 100.0)
        assert sample.generation_s == pytest.approx(tokens / 100.0)
        assert len(sample.logprobs) == tokens
        assert sample.spans == [Span(0, 0, tokens)]
        assert sample.finish_reason == "stop"

    run(scenario())


def test_a_response_over_the_cap_is_cut_and_keeps_its_label():
    async def scenario() -> None:
        worker = SimulatedWorker(Simulated(), seed=0)
        whole, cut = await worker.generate(request(0)), await worker.generate(request(0, max_tokens=3))
        assert len(cut.token_ids) == 3
        assert (cut.finish_reason, cut.text) == ("length", whole.text)

    run(scenario())


def test_an_aborted_request_answers_with_the_tokens_it_had():
    async def scenario() -> None:
        config = Simulated(tokens_mean=1000.0, tokens_sigma=0.0, tokens_per_s=100.0)
        worker = SimulatedWorker(config, seed=0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(worker.generate(request(0)))
            await asyncio.sleep(2.005)
            await worker.abort([SampleKey(0, 0), SampleKey(9, 9)])
        sample = task.result()
        assert (len(sample.token_ids), sample.finish_reason, sample.text) == (200, "abort", "")
        assert sample.spans == [Span(0, 0, 200)]
        await worker.abort([SampleKey(0, 0)])  # already done

    run(scenario())


def test_tokens_after_an_update_carry_the_new_version():
    async def scenario() -> None:
        config = Simulated(tokens_mean=1000.0, tokens_sigma=0.0, tokens_per_s=100.0)
        worker = SimulatedWorker(config, seed=0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(worker.generate(request(0)))
            await asyncio.sleep(2.005)
            for version in (1, 2):  # the first of them samples no token
                await worker.stage(manifest(version))
                await worker.apply(manifest(version), load=True)
        spans = task.result().spans
        assert [(span.version, span.start) for span in spans] == [(0, 0), (2, 200)]
        assert spans[-1].end == len(task.result().token_ids)
        assert (await worker.generate(request(1))).spans[0].version == 2

    run(scenario())


def test_a_drawn_failure_fails_its_request_and_a_retry_can_pass():
    async def scenario() -> None:
        worker = SimulatedWorker(Simulated(failure_rate=0.5), seed=7)
        for index in range(20):
            for retry in range(40):
                try:
                    sample = await worker.generate(request(index, retry=retry))
                except SimulatedFailure:
                    continue
                assert sample.key.index == index
                break
            else:
                pytest.fail("40 failures in a row at a rate of one half")

    run(scenario())


def test_real_weights_are_refused():
    async def scenario() -> None:
        worker = SimulatedWorker(Simulated(), seed=0)
        with pytest.raises(WeightUpdateError, match="without tensors"):
            await worker.stage(manifest(1, mover="shm"))

    run(scenario())
