"""A key that nothing would read is refused, the neighbours that read it are taken, and defaults go anywhere."""

import pytest

from configs import Config, load_config
from configs.load import ConfigError, dump_config
from configs.meaning import MEANING, meaningless

SETTINGS = {
    "sampling.top_p": ("0.9", "learner.kind=simulated", ["learner.kind=torch"]),
    "reward.overlong_factor": ("0.5", "reward.overlong_tokens=8", ["reward.overlong_tokens=0"]),
    "loss.clip_low": ("0.1", "loss.objective=gspo", ["loss.objective=reinforce", "loss.objective=likelihood"]),
    "loss.clip_high": ("0.1", "loss.objective=cispo", ["loss.objective=reinforce", "loss.objective=likelihood"]),
    "loss.dual_clip": (
        "3",
        "loss.objective=decoupled",
        ["loss.objective=cispo", "loss.objective=reinforce", "loss.objective=likelihood"],
    ),
    "loss.proximal": (
        "recompute",
        "loss.objective=decoupled",
        [f"loss.objective={name}" for name in ("ppo", "cispo", "gspo", "reinforce", "likelihood")],
    ),
    "loss.m2_budget": ("0.04", "loss.objective=cispo", ["loss.objective=gspo"]),
    "loss.constant_tokens": (
        "100",
        "loss.aggregation=constant",
        ["loss.aggregation=auto", "loss.aggregation=token_mean", "loss.aggregation=sequence_mean"],
    ),
    "loss.mismatch.level": (
        "sequence",
        "loss.objective=decoupled",
        ["loss.objective=ppo", "loss.mismatch.rule=none", "loss.objective=reinforce loss.mismatch.rule=icepop"],
    ),
    "loss.mismatch.cap": (
        "3",
        "loss.objective=reinforce loss.mismatch.rule=tis",
        ["loss.objective=gspo", "loss.mismatch.rule=none", "loss.objective=decoupled loss.mismatch.rule=icepop"],
    ),
    "loss.mismatch.low": (
        "0.4",
        "loss.objective=reinforce loss.mismatch.rule=icepop",
        ["loss.objective=decoupled", "loss.objective=reinforce loss.mismatch.rule=tis", "loss.objective=ppo"],
    ),
    "loss.mismatch.high": (
        "4",
        "loss.objective=decoupled loss.mismatch.rule=icepop",
        ["loss.objective=decoupled", "loss.objective=reinforce"],
    ),
    "loss.kl.weight": ("0.1", "learner.kind=torch", ["learner.kind=simulated"]),
    "loss.kl.estimator": ("k1", "loss.kl.weight=0.1", ["loss.kl.weight=0"]),
    "loss.kl.reference": ("X", "loss.kl.weight=0.1", ["loss.kl.weight=0.0"]),
    "lora.rank": ("8", "learner.kind=torch", ["learner.kind=simulated", "learner.backend=deepspeed"]),
    "lora.alpha": ("16", "lora.rank=8", ["lora.rank=0"]),
    "lora.target_modules": ("['q_proj']", "lora.rank=8", ["lora.rank=0"]),
    "learner.backend": ("deepspeed", "learner.kind=torch", ["learner.kind=simulated"]),
    "learner.device": ("cuda", "learner.kind=torch", ["learner.kind=simulated"]),
    "learner.compile": ("true", "learner.backend=torch", ["learner.backend=deepspeed", "learner.kind=simulated"]),
    "learner.zero_stage": ("3", "learner.backend=deepspeed", ["learner.backend=torch"]),
    "learner.rank_deadline_s": ("30", "learner.backend=deepspeed", ["learner.backend=torch"]),
    "advantage.baseline": ("kept", "advantage.name=custom", ["advantage.name=auto", "advantage.name=grpo"]),
    "advantage.divide_by_std": ("true", "advantage.name=custom", ["advantage.name=auto", "advantage.name=grpo"]),
    "advantage.weight": ("inverse", "advantage.name=custom", ["advantage.name=auto", "advantage.name=maxrl"]),
    "advantage.max_weight": (
        "5",
        "advantage.name=custom advantage.weight=inverse_sqrt",
        ["advantage.name=hybrid", "advantage.name=custom", "advantage.name=custom advantage.weight=maxrl"],
    ),
    "advantage.epsilon": (
        "0.01",
        "advantage.name=custom advantage.weight=inverse",
        ["advantage.name=hybrid", "advantage.name=custom"],
    ),
    "advantage.centring": ("anchor_pos", "advantage.name=custom", ["advantage.name=anchored"]),
    "advantage.whiten": ("true", "advantage.name=custom", ["advantage.name=auto"]),
    "futility.p_success": ("0.3", "strategy.futility=threshold", ["strategy.futility=optimal"]),
    "futility.prior_right": ("1", "strategy.futility=expired", ["strategy.futility=optimal"]),
    "futility.prior_wrong": ("1", "strategy.futility=none", ["strategy.futility=optimal"]),
    "futility.prior": (
        "0.2",
        "strategy.futility=optimal",
        ["strategy.futility=expired", "strategy.futility=threshold"],
    ),
    "selector.pool": ("32", "selector.name=mopps", ["selector.name=uniform", "selector.name=greso"]),
    "selector.prior_right": ("2", "selector.name=curriculum", ["selector.name=uniform", "selector.name=greso"]),
    "selector.prior_wrong": ("2", "selector.name=mopps", ["selector.name=uniform", "selector.name=greso"]),
    "selector.mopps.target": ("0.4", "selector.mopps.rule=nearest", ["selector.mopps.rule=band"]),
    "selector.mopps.low": ("0.2", "selector.mopps.rule=band", ["selector.mopps.rule=nearest"]),
    "selector.mopps.high": ("0.8", "selector.mopps.rule=band", ["selector.mopps.rule=nearest"]),
    "cores.generation": ("[0]", "cores.pin=true", ["cores.pin=false"]),
    "cores.learning": ("[0]", "cores.pin=true", ["cores.pin=false"]),
}
"""{key: (value, overrides that read it, overrides that do not)}."""
REFUSED = [(key, value, beside) for key, (value, _, refused) in SETTINGS.items() for beside in refused]


def load(folder, *overrides):
    path = folder / "run.toml"
    path.write_text("[run]\nmax_steps = 1\n", encoding="utf-8")
    return load_config(path, overrides)


def test_every_key_of_the_table_is_tried():
    assert set(SETTINGS) == set(MEANING)


@pytest.mark.parametrize(("key", "value", "beside"), REFUSED)
def test_a_key_that_nothing_reads_is_refused_with_what_it_needs(tmp_path, key, value, beside):
    with pytest.raises(ConfigError, match=f"{key} must be ") as caught:
        load(tmp_path, *beside.split(), f"{key}={value}")
    text = str(caught.value)
    assert f", got {value}: " in text.replace('"', "'").replace("'" + value + "'", value)
    assert len(text.splitlines()) == 1
    assert any(f" with {where.key} = " in text for where in MEANING[key])


@pytest.mark.parametrize("key", SETTINGS)
def test_where_it_is_read_it_is_taken_and_comes_back_from_the_run_folder(tmp_path, key):
    value, beside, _ = SETTINGS[key]
    config = load(tmp_path, *beside.split(), f"{key}={value}")
    assert list(meaningless(config)) == []
    path = tmp_path / "dumped.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(("key", "value", "beside"), REFUSED)
def test_its_default_is_taken_everywhere(tmp_path, key, value, beside):
    config = load(tmp_path, *beside.split())
    path = tmp_path / "dumped.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert f"{key.rpartition('.')[2]} = " in path.read_text(encoding="utf-8")
    assert load_config(path) == config


def test_auto_is_named_with_what_it_means(tmp_path):
    with pytest.raises(ConfigError, match=r"with loss.mismatch.rule = auto \(here none\), got 3"):
        load(tmp_path, "loss.mismatch.cap=3")
    with pytest.raises(ConfigError, match=r"with loss.mismatch.rule = auto \(here tis\), got 0.4"):
        load(tmp_path, "loss.objective=decoupled", "loss.mismatch.low=0.4")


def test_every_such_key_is_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "lora.alpha=16", "loss.kl.estimator=k2", "learner.zero_stage=1")
    lines = str(caught.value).splitlines()
    assert [line.split()[2] for line in lines] == ["loss.kl.estimator", "lora.alpha", "learner.zero_stage"]
    assert all(line.startswith("config ") for line in lines)


def test_a_stages_selector_is_held_to_the_same(tmp_path):
    path = tmp_path / "run.toml"
    text = '[run]\nmax_steps = 9\n[[stages]]\nfrom_step = 3\n[stages.selector]\nname = "NAME"\npool = 8\n'
    path.write_text(text.replace("NAME", "greso"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"stages.0.selector.pool must be 16 with selector.name = greso, got 8"):
        load_config(path)
    path.write_text(text.replace("NAME", "mopps"), encoding="utf-8")
    assert load_config(path).stages[0].selector.pool == 8


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy.name=fixed", "giveup.k=8", "pilot.n_pilot=8", "allocation.samples_per_prompt=4"],
        ["selector.name=greso", "selector.mopps.rule=band", "selector.mopps.low=0.2", "selector.curriculum.steps=10"],
        ["strategy.name=fixed", "strategy.k_pos=4", "strategy.k_neg=4", "strategy.round_size=4"],
        ["worker.kind=vllm", "simulated.tokens_mean=100.0", "sim.prompts=10"],
        ["learner.kind=simulated", "optimizer.lr=1e-5", "learner.micro_batch_tokens=4096", "worker.kind=simulated"],
        ["data.test=''", "evaluation.samples=1"],
        ["strategy.futility=none", "futility.prior=0.2", "futility.p_success=0.3"],
    ],
)
def test_what_belongs_to_another_choice_may_stay_in_the_file(tmp_path, overrides):
    assert isinstance(load(tmp_path, *overrides), Config)
