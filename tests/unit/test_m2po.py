"""M2PO's mask: the least that brings the second moment within its budget, and only of tokens that push outwards."""

import numpy as np
import pytest
import torch

from learner.objectives.m2po import m2po_mask


def mask(log_ratios, advantages, budget=0.04) -> list[bool]:
    return m2po_mask(torch.tensor(log_ratios, dtype=torch.float64), torch.tensor(advantages), budget).tolist()


def test_the_farthest_token_goes_first_and_no_more_than_needed():
    # Squares .01, .04, .09 and .36: mean .125; without .36 .047; without .09 as well .025.
    assert mask([0.1, -0.2, 0.3, 0.6], [1.0, -1.0, 1.0, 1.0]) == [False, False, True, True]
    assert mask([0.1, -0.2, 0.3, 0.6], [1.0, -1.0, 1.0, 1.0], budget=0.05) == [False, False, False, True]
    assert mask([0.1, -0.2, 0.3, 0.6], [1.0, -1.0, 1.0, 1.0], budget=0.2) == [False] * 4


def test_tokens_that_come_back_are_never_left_out_nor_counted():
    assert mask([-3.0, 3.0, 3.0, 0.3], [1.0, -1.0, 0.0, 1.0]) == [False, False, False, True]


def test_equal_tokens_share_their_fate():
    assert mask([0.1, 0.3, 0.3], [1.0, 1.0, 1.0]) == [False, True, True]


def test_all_are_left_out_where_even_the_nearest_is_too_far():
    assert mask([0.5, 0.6], [1.0, 1.0]) == [True, True]


def test_no_tokens_and_no_differences_leave_nothing_out():
    assert mask([], []) == []
    assert mask([0.0, 0.0], [1.0, -1.0]) == [False, False]


@pytest.mark.parametrize("seed", range(20))
def test_what_stays_is_within_the_budget_and_one_token_more_is_not(seed):
    rng = np.random.default_rng(seed)
    log_ratios, advantages = rng.normal(0.0, 0.4, 50), rng.normal(size=50)
    out = np.array(mask(log_ratios.tolist(), advantages.tolist()))
    harmful = log_ratios * advantages > 0
    assert not (out & ~harmful).any()
    stays = log_ratios[harmful & ~out] ** 2
    assert stays.mean() <= 0.04
    nearest_out = (log_ratios[out] ** 2).min()
    assert np.append(stays, nearest_out).mean() > 0.04
