"""Configuration: presets load, mistakes name the key, overrides apply."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from configs import Config, load_config
from configs.load import ConfigError

PRESETS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.toml"))


def _write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _models(model: type[BaseModel]):
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):  # lists of sections too
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _models(kind)


def test_the_presets_are_there():
    assert {path.name for path in PRESETS} >= {"quickstart.toml", "sim.toml", "gpu.toml"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads(preset):
    assert load_config(preset).run.name


def test_every_key_is_documented():
    bare = [f"{m.__name__}.{name}" for m in _models(Config) for name, f in m.model_fields.items() if not f.description]
    assert bare == []


def test_an_unknown_key_names_itself_the_value_and_what_is_allowed(tmp_path):
    path = _write(tmp_path, "[sampling]\nmax_token = 32\n")
    with pytest.raises(ConfigError, match=r"unknown key 'sampling.max_token' \(got 32\)") as caught:
        load_config(path, ["run.max_steps=1"])
    assert "did you mean 'max_tokens'?" in str(caught.value)
    assert "allowed: max_tokens, temperature, top_p" in str(caught.value)


def test_an_unknown_section_names_the_sections(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'sampler'") as caught:
        load_config(_write(tmp_path, "[sampler]\nx = 1\n"))
    assert "did you mean 'sampling'?" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.max_tokens=0", "sampling.max_tokens: Input should be greater than or equal to 1, got 0"),
        ("sampling.max_tokens=many", "sampling.max_tokens: .* got \"many\""),
        ("strategy.name=fast", "strategy.name must be one of balance, dapo, .*, got 'fast'"),
        ("staleness.max=-1", "staleness.max: .* got -1"),
        ("strategy.n_max=3", r"n_max must be >= k_pos \+ k_neg = 4"),
        ("strategy.group_size=3", "group_size must be even"),
        ("learner.mini_batches=17", "learner.mini_batches must be <= learner.groups_per_step = 16, got 17"),
        ("learner.micro_batch_tokens=511", "micro_batch_tokens must be >= model.max_context_tokens = 512, got 511"),
        ("learner.device=tpu", "learner.device: .* got \"tpu\""),
        ("sampling.max_tokens", "override must look like section.key=value"),
        ("max_tokens=3", "override must look like section.key=value"),
        ("run.resume=", "run.resume: String should have at least 1 character"),
        ("checkpoint.keep_every=4", "checkpoint.keep_every must be a multiple of checkpoint.every_steps = 0, got 4"),
        ("run.max_steps=0", "run.max_steps or run.max_train_s must be above 0"),
        ("run.name=..", "run.name must be letters, digits, .* not dots alone, got '..'"),
        ("run.name=a/b", "run.name must be letters, digits, .* got 'a/b'"),
        ("run.seed=4294967296", "run.seed: .* less than 4294967296, got 4294967296"),
        ("optimizer.weight_decay=2e6", r"optimizer.weight_decay must be < 1 / optimizer.lr = 1e\+06, got 2e\+06"),
        ("optimizer.lr=2", "optimizer.lr: .* less than or equal to 1, got 2"),
        ("sampling.temperature=1e-3", "sampling.temperature: .* greater than or equal to 0.01, got 0.001"),
        ("worker.heartbeat_deadline_s=3", "worker.heartbeat_deadline_s: .* greater than or equal to 4, got 3"),
        ("worker.count=100000", "worker.count: .* less than or equal to 1024, got 100000"),
        ("learner.zero_stage=4", "learner.zero_stage: .* less than or equal to 3, got 4"),
        ("simulated.tokens_sigma=6", "simulated.tokens_sigma: .* less than or equal to 5, got 6"),
        ("cores.generation=[-1]", "cores.generation.0: .* greater than or equal to 0, got -1"),
        ("cores.generation=[1, 1]", r"cores.generation must name each core once, got \[1, 1\]"),
        ("server.wire_port=8890", "server.wire_port must not be server.http_port, got 8890 for both"),
        ("data.answer_column=problem", "data.answer_column must not be data.prompt_column, got 'problem' for both"),
        ("data.train=", 'data.train: String should have at least 1 character, got ""'),
        ("strategy.exit=positives", "strategy.exit must be balance for balance, got positives: only rounds reads it"),
        ("lora.target_modules=['']", 'lora.target_modules.0: String should have at least 1 character, got ""'),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_key_and_value(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(_write(tmp_path, "[run]\nmax_steps = 1\n"), [override])


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.warmup_steps=10", "run.max_steps=5"],  # a trial of a longer run
        ["optimizer.weight_decay=0.9", "optimizer.lr=1"],
        ["sampling.temperature=0.01"],
        ["sampling.temperature=100"],
        ["worker.heartbeat_deadline_s=4"],
        ["worker.count=1024"],
        ["simulated.tokens_sigma=5"],
        ["run.name=.a-1_b"],
        ["run.seed=4294967295"],
        ["server.http_port=0", "server.wire_port=0"],
        ["strategy.exit=positives", "strategy.name=rounds"],
        ["strategy.exit=positives", "strategy.name=my.strategies:Own"],
    ],
    ids=" ".join,
)
def test_the_nearest_allowed_value_is_taken(tmp_path, overrides):
    assert load_config(_write(tmp_path, "[run]\nmax_steps = 1\n"), overrides)


def test_cores_are_not_given_to_both_sides_unless_there_is_one(tmp_path):
    path = _write(tmp_path, "[run]\nmax_steps = 1\n")
    with pytest.raises(ConfigError, match=r"cores.learning must share no core with .*, got \[1\] in both"):
        load_config(path, ["cores.generation=[0, 1]", "cores.learning=[1]"])
    assert load_config(path, ["cores.generation=[0]", "cores.learning=[0]"]).cores.learning == (0,)


def test_a_stage_without_its_step_says_so(tmp_path):
    text = '[run]\nmax_steps = 9\n[[stages]]\nselector = {name = "mopps"}\n'
    with pytest.raises(ConfigError, match=r"stages\.0\.from_step must be set$"):
        load_config(_write(tmp_path, text))
    with pytest.raises(ConfigError, match="stages: Input should be a list, got 3"):
        load_config(_write(tmp_path, "stages = 3\n[run]\nmax_steps = 9\n"))


def test_an_override_wins_over_the_file_and_keeps_its_type(tmp_path):
    path = _write(tmp_path, "[run]\nmax_steps = 1\n[sampling]\nmax_tokens = 8\n")
    config = load_config(path, ["sampling.max_tokens=32", "data.levels=['1d+1d']", "data.train=a.jsonl"])
    assert config.sampling.max_tokens == 32
    assert config.data.levels == ("1d+1d",)
    assert config.data.train == "a.jsonl"


def test_a_missing_file_and_a_broken_file_say_so(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(_write(tmp_path, "[run\n"))
    path = tmp_path / "latin.toml"
    path.write_bytes('[run]\nname = "Zürich"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config .*latin.toml: not UTF-8 text: invalid start byte at byte 15"):
        load_config(path)


def test_a_loaded_config_cannot_be_changed(tmp_path):
    config = load_config(_write(tmp_path, "[run]\nmax_steps = 1\n"))
    with pytest.raises(ValueError, match="frozen"):
        config.run.max_steps = 2
