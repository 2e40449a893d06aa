"""Types and infinities: TOML's types are taken at their word; a number is finite unless infinity has a meaning."""

import math

import pytest
from pydantic import BaseModel

from configs import Config, load_config
from configs.load import ConfigError, dump_config

MAY_BE_INFINITE = {"loss.clip_high", "loss.dual_clip", "optimizer.max_grad_norm"}
INTEGER, NUMBER = "Input should be a valid integer", "Input should be a valid number"


def load(folder, *overrides):
    path = folder / "run.toml"
    path.write_text("[run]\nmax_steps = 1\n", encoding="utf-8")
    return load_config(path, overrides)


def keys(model: type[BaseModel], kind: type, path: str = ""):
    """Dotted names of all fields of a plain type."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, kind, f"{path}{name}.")
        elif field.annotation is kind:
            yield path + name


FLOATS, INTEGERS, BOOLEANS = (sorted(keys(Config, kind)) for kind in (float, int, bool))


def test_every_kind_of_key_is_looked_at():
    assert len(FLOATS) > 60
    assert {"loss.kl.weight", "selector.mopps.low", "learner.idle_deadline_s"} <= set(FLOATS)
    assert {"learner.mini_batches", "learner.zero_stage"} <= set(INTEGERS)
    assert {"learner.share_prefixes", "cores.pin"} <= set(BOOLEANS)


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_number_that_is_not_finite_is_refused_where_it_has_no_meaning(tmp_path, key, value):
    if key in MAY_BE_INFINITE and value == "inf":
        loaded = load(tmp_path, f"{key}=inf")
        section, _, name = key.partition(".")
        assert math.isinf(loaded.model_dump()[section][name])
        assert load_config(_written(tmp_path, dump_config(loaded))) == loaded
    else:
        with pytest.raises(ConfigError, match=f"{key}: Input should be .* got {value}$"):
            load(tmp_path, f"{key}={value}")


@pytest.mark.parametrize("key", FLOATS)
def test_a_number_is_no_boolean_and_no_text(tmp_path, key):
    for value in ("true", '"1"', ".5"):
        with pytest.raises(ConfigError, match=f"{key}: {NUMBER}.* got ") as caught:
            load(tmp_path, f"{key}={value}")
        assert str(caught.value).endswith(f"got {value}" if value != ".5" else 'got ".5"')


@pytest.mark.parametrize("key", INTEGERS)
def test_an_integer_is_no_boolean_no_text_and_no_fraction(tmp_path, key):
    for value in ("true", '"4"', "4.0", "1e3"):
        with pytest.raises(ConfigError, match=f"{key}: {INTEGER}.* got {'1000.0' if value == '1e3' else value}$"):
            load(tmp_path, f"{key}={value}")


@pytest.mark.parametrize("key", BOOLEANS)
def test_a_boolean_is_true_or_false(tmp_path, key):
    for value, got in (("yes", '"yes"'), ("1", "1"), ('"true"', '"true"')):
        with pytest.raises(ConfigError, match=f"{key}: Input should be true or false, got {got}$"):
            load(tmp_path, f"{key}={value}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.name=5", "run.name: Input should be a valid string, got 5"),
        ("data.levels=easy", 'data.levels: Input should be a list, got "easy"'),
        ("data.levels=[1]", "data.levels.0: Input should be a valid string, got 1"),
        ("simulated.pass_rate=[true]", f"simulated.pass_rate.0: {NUMBER}.* got true"),
        ("simulated.pass_rate=0.5", "simulated.pass_rate: Input should be a list, got 0.5"),
        ("cores.generation=['0']", f"cores.generation.0: {INTEGER}.* got \"0\""),
        ("strategy.group_size='4'", f"strategy.group_size: {INTEGER}.* got \"4\""),
    ],
)  # fmt: skip
def test_other_types_are_taken_at_their_word_too(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, override)


def test_an_integer_is_a_number_and_a_list_a_tuple(tmp_path):
    config = load(
        tmp_path,
        "optimizer.weight_decay=0", "sampling.temperature=2", "simulated.pass_rate=[0, 0.5, 1]", "cores.generation=[0]",
        "sim.pass_rate=[0, 1]", "loss.kl.weight=1", "worker.slots=1_000",
    )  # fmt: skip
    assert (config.optimizer.weight_decay, config.sampling.temperature, config.loss.kl.weight) == (0.0, 2.0, 1.0)
    assert (config.simulated.pass_rate, config.cores.generation, config.sim.pass_rate) == (
        (0.0, 0.5, 1.0),
        (0,),
        (0.0, 1.0),
    )
    assert load_config(_written(tmp_path, dump_config(config))) == config


def _written(folder, text):
    path = folder / "dumped.toml"
    path.write_text(text, encoding="utf-8")
    return path
