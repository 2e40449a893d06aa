"""One update of the policy: streaming or in mini-batches, and what is a step and what is none."""

import gc
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from engine.core.errors import RunError
from learner.backends.torch import TorchBackend
from learner.update import mini_batches
from tests.support.learner_inputs import changed, learner_config, random_group, tiny_policy, with_token_values
from tests.support.live_memory import LiveMemory
from tests.support.policy_updates import (
    group,
    update_of,
    weights,
    with_a_broken_token,
    without_a_finite_logprob,
)


def test_with_one_mini_batch_the_gradient_is_computed_as_groups_come_in():
    update, backend = update_of()
    update.add([group(3), group(1)])
    update.add([group(2)])
    assert backend.accumulated == [[3, 1], [2]]
    metrics = update.take(0)
    assert backend.calls[-1] == metrics["tokens_trained"] == 45
    assert (metrics["skipped"], metrics["not_finite"]) == (0.0, 0.0)


def test_mini_batches_are_steps_of_their_own_over_all_groups_once():
    update, backend = update_of(learner={"mini_batches": 3})
    update.add([group(n) for n in range(4)])
    update.add([group(n) for n in range(4, 8)])
    assert backend.calls == []
    metrics = update.take(0)
    assert sorted(len(ids) for ids in backend.accumulated) == [2, 3, 3]
    assert sorted(itertools.chain(*backend.accumulated)) == list(range(8))
    assert [type(call) for call in backend.calls] == [tuple, float] * 3
    assert metrics["tokens_trained"] == 8 * 15
    assert backend._steps == 3
    update.add([group(9)])
    assert update.take(1)["tokens_trained"] == 15


def test_two_mini_batches_are_two_plain_steps_and_their_metrics_combine():
    update, backend = update_of(learner={"mini_batches": 2}, optimizer={"lr": 1e-2, "warmup_steps": 4})
    made = {n: group(n, lengths=(3, n + 1)) for n in range(6)}
    update.add(list(made.values()))
    metrics = update.take(7)
    plain, reference = update_of(optimizer={"lr": 1e-2, "warmup_steps": 4})
    parts = []
    for ids in backend.accumulated:
        plain.add([made[group_id] for group_id in ids])
        parts.append(plain.take(7))
    assert torch.equal(weights(backend), weights(reference))
    tokens = [part["tokens_trained"] for part in parts]
    for key in ("loss", "entropy", "kl_behaviour"):
        expected = sum(part[key] * count for part, count in zip(parts, tokens, strict=True)) / sum(tokens)
        assert metrics[key] == pytest.approx(expected), key
    assert metrics["ratio_max"] == max(part["ratio_max"] for part in parts)
    assert metrics["grad_norm"] == pytest.approx(sum(part["grad_norm"] for part in parts) / 2)
    assert metrics["lr"] == parts[1]["lr"] == 0.005
    assert metrics["tokens_packed"] == sum(part["tokens_packed"] for part in parts)


def test_the_shuffle_depends_on_seed_and_version_and_not_on_the_order_of_arrival():
    made = [group(n, lengths=(1,)) for n in range(12)]

    def parts(groups, seed):
        return [[group.group_id for group in part] for part in mini_batches(groups, 3, seed)]

    assert parts(made, (0, 5)) == parts(made[::-1], (0, 5))
    assert parts(made, (0, 5)) != parts(made, (0, 6))
    assert parts(made, (0, 5)) != parts(made, (1, 5))
    first = Counter(group_id for version in range(600) for group_id in parts(made, (0, version))[0])
    # Each group is in the first of three parts a third of the time: 200 ± 11.5.
    assert min(first.values()) > 150
    assert max(first.values()) < 250


def test_the_proximal_policy_is_the_one_before_the_first_mini_batch():
    decoupled = {"objective": "decoupled", "proximal": "recompute"}
    update, backend = update_of(learner={"mini_batches": 2}, loss=decoupled)
    made = [group(n) for n in range(4)]
    before = TorchBackend(tiny_policy(), learner_config()).response_logprobs(made)
    update.add(made)
    update.take(0)
    assert backend.calls[0] == "response logprobs"
    for _, proximal in (call for call in backend.calls if isinstance(call, tuple)):
        assert proximal.keys() == before.keys()
        for key, values in proximal.items():
            np.testing.assert_allclose(values, before[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mini_batches", "loss"),
    [(1, {"objective": "decoupled", "proximal": "recompute"}), (2, {"objective": "decoupled"}), (2, {})],
)
def test_no_pass_is_made_for_a_proximal_policy_that_is_not_needed(mini_batches, loss):
    update, backend = update_of(learner={"mini_batches": mini_batches}, loss=loss)
    update.add([group(0), group(1)])
    update.take(0)
    assert "response logprobs" not in backend.calls
    assert all(call[1] is None for call in backend.calls if isinstance(call, tuple))


@pytest.mark.parametrize(
    "groups",
    [[], [group(0, ()), group(1, ())], [group(0, (0, 0))], [with_token_values(np.random.default_rng(), group(0), 1.0)]],
    ids=["none", "all filtered", "no tokens", "all masked"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_an_update_without_trained_tokens_takes_no_step(groups, count):
    update, backend = update_of(learner={"mini_batches": count})
    update.add([group(0), group(1)])
    update.take(0)  # leaves momentum behind
    before = weights(backend)
    update.add(groups)
    metrics = update.take(1)
    assert torch.equal(weights(backend), before)
    assert metrics == {"tokens_trained": 0.0, "tokens_packed": 0.0, "skipped": float(count), "not_finite": 0.0}


def without_signal(group_id, advantage=0.0):
    made = group(group_id)
    made.samples[:] = [changed(sample, advantage=advantage) for sample in made.samples]
    return made


def test_a_step_without_an_advantage_takes_the_entropy_bonus_alone():
    update, backend = update_of(loss={"entropy_weight": 1e-4}, optimizer={"lr": 1e-3, "weight_decay": 0.0})
    entropies = []
    for version in range(3):
        update.add([without_signal(0), without_signal(1)])
        metrics = update.take(version)
        assert (metrics["skipped"], metrics["tokens_trained"]) == (0.0, 30.0)
        assert 0.0 < metrics["grad_norm"] < 1e-2
        entropies.append(metrics["entropy"])
    assert backend._steps == 3
    assert entropies == sorted(set(entropies))


def test_a_step_without_an_advantage_or_a_bonus_goes_on_by_momentum_alone():
    update, backend = update_of(loss={"entropy_weight": 0.0}, optimizer={"lr": 1e-3, "weight_decay": 0.0})
    states = [weights(backend)]
    for version, advantage in enumerate((0.0, 1.0, 0.0)):
        update.add([without_signal(version, advantage)])
        metrics = update.take(version)
        assert metrics["skipped"] == 0.0
        assert (metrics["grad_norm"] > 0.0) is (advantage > 0.0)
        states.append(weights(backend))
    assert [not torch.equal(before, after) for before, after in itertools.pairwise(states)] == [False, True, True]


def test_weights_that_all_grow_alike_change_no_step():
    states = []
    for factor in (0.001, 1.0):
        update, backend = update_of()
        made = group(3)
        made.samples[:] = [
            changed(sample, token_weights=np.full(sample.token_ids.size, factor, np.float32)) for sample in made.samples
        ]
        update.add([made])
        update.take(0)
        states.append(weights(backend))
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_two_groups_of_one_id_are_refused(count):
    update, _ = update_of(learner={"mini_batches": count})
    update.add([group(3), group(4)])
    update.take(0)
    update.add([group(3)])  # of another update
    with pytest.raises(RunError, match="every group of an update must have an id of its own, got 3 twice"):
        update.add([group(5), group(3, lengths=(2, 2))])
    again, _ = update_of(learner={"mini_batches": count})
    with pytest.raises(RunError, match="got 5 twice"):
        again.add([group(5), group(5)])


def test_responses_of_one_token_train():
    update, backend = update_of()
    before = weights(backend)
    update.add([group(0, (1, 1))])
    metrics = update.take(0)
    assert metrics["tokens_trained"] == 2
    assert all(math.isfinite(value) for value in metrics.values())
    assert not torch.equal(weights(backend), before)


def test_a_response_of_the_longest_allowed_length_trains():
    update, _ = update_of(learner={"micro_batch_tokens": 60})
    longest = random_group(np.random.default_rng(0), prompt=[5, 6, 7], lengths=(57, 2))
    update.add([longest])
    metrics = update.take(0)
    assert metrics["tokens_trained"] == 59
    assert math.isfinite(metrics["grad_norm"])


def test_a_group_that_cannot_be_trained_is_refused_before_anything_is_computed():
    update, backend = update_of(learner={"micro_batch_tokens": 60})
    long = random_group(np.random.default_rng(0), 8, prompt=[5, 6, 7], lengths=(58,))
    with pytest.raises(RunError, match=r"group 8 \(prompt 8\), sample 0: .*micro_batch_tokens = 60 tokens, got 61"):
        update.add([group(0), long])
    assert backend.calls == []


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_named(caplog):
    update, backend = update_of(with_a_broken_token())
    update.add([group(0), without_a_finite_logprob(5), group(1)])
    before = weights(backend)
    metrics = update.take(3)
    assert torch.equal(weights(backend).nan_to_num(), before.nan_to_num())
    assert metrics == {
        "tokens_trained": 0.0, "tokens_packed": metrics["tokens_packed"], "skipped": 1.0, "not_finite": 1.0
    }  # fmt: skip
    assert "from version 3: groups 5 (their logprobs are not finite)" in caplog.text


def test_a_streak_of_skipped_steps_ends_the_run_with_the_groups_of_each():
    update, _ = update_of(with_a_broken_token(), learner={"max_skipped_steps": 2})
    update.add([without_a_finite_logprob(5), group(1)])
    update.take(3)
    update.add([group(2), without_a_finite_logprob(6), without_a_finite_logprob(4)])
    with pytest.raises(RunError, match=r"2 optimizer steps in a row .* version 3: groups 5 .*; .* 4: groups 4, 6 \("):
        update.take(4)


def test_a_step_between_them_breaks_the_streak():
    update, _ = update_of(with_a_broken_token(), learner={"max_skipped_steps": 2})
    for version in range(6):
        update.add([group(1) if version % 2 else without_a_finite_logprob(5)])
        assert update.take(version)["not_finite"] == (version + 1) % 2


def test_a_gradient_that_overflows_names_all_groups_of_the_step(caplog):
    policy = tiny_policy()
    policy.trunk.norm.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * torch.inf,))
    update, _ = update_of(policy)
    update.add([group(2), group(7)])
    assert update.take(0)["not_finite"] == 1.0
    assert "groups 2, 7 (each alone is finite: all of the step)" in caplog.text


def test_a_mini_batch_that_is_skipped_leaves_the_others_and_their_means():
    update, backend = update_of(with_a_broken_token(), learner={"mini_batches": 3})
    update.add([group(0), group(1), without_a_finite_logprob(2)])
    metrics = update.take(0)
    assert (metrics["skipped"], metrics["not_finite"], metrics["tokens_trained"]) == (1.0, 1.0, 30.0)
    assert math.isfinite(metrics["loss"])
    assert backend._steps == 2


def test_updates_leave_nothing_in_memory():
    update, _ = update_of(learner={"mini_batches": 2}, loss={"objective": "decoupled", "proximal": "recompute"})
    live = []
    with LiveMemory() as memory:
        for version in range(6):
            update.add([group(0), group(1)])
            update.take(version)
            gc.collect()
            live.append(memory.live_bytes)
    # The first step makes the optimizer's moments.
    assert live[0] > 0
    assert set(live) == {live[0]}
