"""Which parts of a loss may go together: every pair, and the text of every refusal."""

import itertools

import pytest

from configs import load_config
from configs.load import ConfigError
from configs.loss import Loss
from engine.policy import make_policy

OBJECTIVES = ("ppo", "cispo", "gspo", "reinforce", "decoupled", "likelihood")
RULES = ("auto", "none", "tis", "icepop")
REFUSED = {(objective, rule) for objective in ("ppo", "cispo", "gspo") for rule in ("tis", "icepop")}
REFUSED |= {("decoupled", "none")}


def load(tmp_path, *overrides):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmax_steps = 1\n", encoding="utf-8")
    return load_config(path, overrides)


@pytest.mark.parametrize(("objective", "rule"), list(itertools.product(OBJECTIVES, RULES)))
def test_a_mismatch_counts_once(tmp_path, objective, rule):
    overrides = f"loss.objective={objective}", f"loss.mismatch.rule={rule}"
    if (objective, rule) in REFUSED:
        message = f"loss.mismatch.rule must be .* for loss.objective = {objective}, got {rule}: its"
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, *overrides)
    else:
        effective = load(tmp_path, *overrides).loss.mismatch_rule
        assert effective == (rule if rule != "auto" else "tis" if objective == "decoupled" else "none")


READ_BY = {
    "clip_low": (0.1, ("ppo", "cispo", "gspo", "decoupled")),
    "clip_high": (0.1, ("ppo", "cispo", "gspo", "decoupled")),
    "dual_clip": (3.0, ("ppo", "gspo", "decoupled")),
    "m2_budget": (0.1, ("ppo", "cispo", "reinforce", "decoupled", "likelihood")),
    "proximal": ("recompute", ("decoupled",)),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("key", READ_BY)
def test_a_key_without_a_meaning_is_refused(tmp_path, objective, key):
    value, readers = READ_BY[key]
    overrides = f"loss.objective={objective}", f"loss.{key}={value}"
    if objective in readers:
        assert load(tmp_path, *overrides).loss.model_dump()[key] == value
    else:
        with pytest.raises(
            ConfigError, match=f"loss.{key} must be .* with loss.objective = {objective}, got .*: it has"
        ):
            load(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.clip_high=0.3", "loss.m2_budget=0.04"], "loss.clip_high must be 0 with loss.m2_budget"),
        (["loss.aggregation=constant"], "loss.constant_tokens must be >= 1 for loss.aggregation = constant, got 0"),
        (
            ["loss.objective=reinforce", "loss.mismatch.rule=icepop", "loss.mismatch.level=sequence"],
            'loss.mismatch.level must be "token" with loss.mismatch.rule = icepop, got "sequence"',
        ),
        (["loss.objective=trpo"], "loss.objective: .* got \"trpo\""),
        (["loss.mismatch.cap=0.5"], "loss.mismatch.cap: .* got 0.5"),
        (["loss.kl=0.1"], "loss.kl must be a section with estimator, reference, weight, got 0.1"),
        (["loss.mismatch=tis"], 'loss.mismatch must be a section with cap, high, level, low, rule, got "tis"'),
        (["loss.kl.beta=0.1"], "unknown key 'loss.kl.beta' .*allowed: estimator, reference, weight"),
        (["reward.overlong_tokens=25"], "reward.overlong_tokens must be <= sampling.max_tokens = 24, got 25"),
    ],
)  # fmt: skip
def test_a_contradiction_names_its_keys(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *overrides)


def test_the_defaults_are_the_papers(tmp_path):
    config = load(tmp_path)
    loss, optimizer = config.loss, config.optimizer
    assert (loss.objective, loss.clips, loss.dual_clip) == ("ppo", (0.2, 0.28), 10.0)
    assert (loss.aggregation_rule, loss.mismatch.rule, loss.mismatch_rule) == ("token_mean", "auto", "none")
    assert (loss.entropy_weight, loss.kl.weight, loss.m2_budget) == (1e-4, 0.0, 0.0)
    assert (optimizer.lr, optimizer.max_grad_norm, optimizer.weight_decay) == (1e-6, 1.0, 0.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-8)
    assert (config.strategy.name, config.strategy.group_size) == ("balance", 4)
    rule = make_policy(config).rule
    assert (rule.baseline, rule.divides_by_std, rule.whiten, rule.weight) == ("pool", False, False, "none")
    assert (config.sampling.temperature, config.sampling.top_p) == (1.0, 1.0)
    assert (config.reward.overlong_tokens, config.lora.rank) == (0, 0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_has_its_own_mean_unless_told(objective):
    assert Loss(objective=objective).aggregation_rule == ("sequence_mean" if objective == "gspo" else "token_mean")
    for rule in ("token_mean", "sequence_mean"):
        assert Loss(objective=objective, aggregation=rule).aggregation_rule == rule


@pytest.mark.parametrize(
    ("objective", "clips"),
    [("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 4.0)), ("decoupled", (0.2, 0.28)), ("ppo", (0.2, 0.28))],
)
def test_an_objective_has_its_own_clips_unless_told(objective, clips):
    assert Loss(objective=objective).clips == clips
    assert Loss(objective=objective, clip_low=0.1, clip_high=0.5).clips == (0.1, 0.5)


def test_m2po_takes_the_place_of_ppos_clip():
    assert Loss(m2_budget=0.04).clips == (1.0, float("inf"))
    assert Loss(objective="decoupled", m2_budget=0.04).clips == (0.2, 0.28)
