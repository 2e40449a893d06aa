"""The learner benchmark gives every way the same batch and counts the same tokens for it."""

import random
from pathlib import Path

import pytest
import torch

from benchmarks.learner import Result, Way, draw_groups, log_normal, table, useful_tokens
from benchmarks.learner_ways import Setup, padded

PROMPTS = [[5, 6, 7], [8, 9]]


def test_lengths_have_the_documented_mean_and_bounds():
    rng, draw = random.Random(0), log_normal(9.0, 0.45, 24)
    lengths = [draw(rng) for _ in range(4000)]
    assert min(lengths) >= 2
    assert max(lengths) == 24
    assert sum(lengths) / len(lengths) == pytest.approx(10.0, abs=0.3)


def test_useful_tokens_count_every_prompt_with_every_answer():
    groups = draw_groups(PROMPTS, 4, lambda rng: 10, seed=0)
    assert useful_tokens(groups) == 4 * (3 + 10) + 4 * (2 + 10)
    assert groups == draw_groups(PROMPTS, 4, lambda rng: 10, seed=0)


def test_trl_gets_prompts_padded_left_and_answers_padded_right():
    groups = [
        {"prompt": prompt, "samples": [{"tokens": tokens, "logprobs": [-0.5] * len(tokens), "advantage": 1.0}]}
        for prompt, tokens in zip(PROMPTS, ([1, 2, 3], [4]), strict=True)
    ]
    batch = padded(Setup("", groups, 2, torch.bfloat16, Path()))
    assert batch["prompt_ids"].tolist() == [[5, 6, 7], [0, 8, 9]]
    assert batch["prompt_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
    assert batch["completion_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["old_per_token_logps"].tolist() == [[-0.5, -0.5, -0.5], [-0.5, 0.0, 0.0]]


def test_ratios_are_to_the_fastest_of_each_kind():
    results = {
        Way(*text.split(":")): Result([seconds], [seconds], 1.0, 10**9, rate, rate)
        for text, seconds, rate in (("shared:64", 1.0, 60.0), ("plain:8", 3.0, 20.0), ("plain:16", 6.0, 10.0))
    }
    assert (
        table(results).splitlines()[1]
        == "shared 64 bfloat16 | 1.00 (1.00-1.00) | 60 3.00 nan | 60 3.00 nan | 1.00 | 1.0000"
    )
