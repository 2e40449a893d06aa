"""Strategies by stage: arms keep the one they were opened with; schedules that cannot be followed are refused."""

from pathlib import Path

import pytest

from configs import load_config
from configs.load import ConfigError, dump_config
from engine.core.arm import Sample
from engine.core.dispatcher import Dispatcher
from engine.core.policy import Policy
from engine.core.selectors import Curriculum, Stage
from engine.core.staleness import Bound
from engine.policy import make_policy
from engine.selection import make_selection
from engine.strategies import Balance, Fixed, Positives
from tests.support.event_driver import Driver, bernoulli, prompt

FOREVER = Bound(1_000_000, 16)
EARLY, MIDDLE, LATE = Positives(1, 8, 2), Balance(4, 4, 32, 8), Balance(8, 8, 64, 16)
STAGED = Policy(EARLY, FOREVER, stages=((2, MIDDLE), (5, LATE)))

SCHEDULE = """
[run]
max_steps = 100

[strategy]  # the first fifth: one right answer, to find out which prompts are hard
name = "positives"
k_pos = 1
n_max = 8
group_size = 2

[[stages]]  # the next three fifths: balanced
from_step = 20
strategy = { name = "balance", k_pos = 4, k_neg = 4, n_max = 32, group_size = 8 }

[[stages]]  # the last fifth: many of both classes
from_step = 80
strategy = { name = "balance", k_pos = 8, k_neg = 8, n_max = 64, group_size = 16 }
"""
"""K = 1, then 4, then 8, with N_max = 8K."""


def load(folder: Path, text: str, *overrides: str):
    path = folder / "staged.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def test_the_schedule_of_one_then_four_then_eight_loads_and_takes_effect_at_its_steps(tmp_path) -> None:
    policy = make_policy(load(tmp_path, SCHEDULE))
    found = {version: policy.strategy_at(version) for version in (0, 19, 20, 79, 80, 99)}
    assert found == {0: EARLY, 19: EARLY, 20: MIDDLE, 79: MIDDLE, 80: LATE, 99: LATE}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from_step = 20", "from_step = 80", r"rising from_step, got \[80, 80\]"),
        ("from_step = 20", "from_step = 90", r"rising from_step, got \[90, 80\]"),
        ("from_step = 80", "from_step = 100", "begin before run.max_steps = 100, got 100"),
        ("from_step = 80", "from_step = 500", "begin before run.max_steps = 100, got 500"),
        ("from_step = 20", "from_step = 0", r"stages.0.from_step must be >= 1, got 0: \[strategy\] covers the start"),
        ("from_step = 20", "from_step = -1", "stages.0.from_step: .* greater than or equal to 0, got -1"),
        ("k_pos = 4, k_neg = 4, n_max = 32, g", "width = 4, g", "stages.0: stages.strategy must not set width"),
        ('name = "balance", k_pos = 4, k_neg = 4, n_max = 32, group_size = 8', 'name = "staged"', "got 'staged'"),
        (
            "k_pos = 8, k_neg = 8",
            "k_poss = 8",
            r"unknown key 'stages.1.strategy.k_poss' .*'k_pos'. allowed: accounting,",
        ),
        (
            'strategy = { name = "balance", k_pos = 8',
            "x = { k_pos = 8",
            "'stages.1.x'.*allowed: from_step, selector, str",
        ),
        (
            "group_size = 16 }",
            "group_size = 16 }\nselector = { pool = 1 }",
            "stages.1.selector.pool: .* equal to 2, got 1",
        ),
        (
            '"balance", k_pos = 8',
            '"estimate", k_pos = 8',
            "advantage.name = auto means ada for .*, hybrid for estimate",
        ),
        ('"balance", k_pos = 8', '"giveup", k_pos = 8', "advantage.name = auto means ada for .*, anchored for giveup"),
        ('"balance", k_pos = 8', '"fixed", k_pos = 8', "strategy.unresolved = auto means drop for .*, keep for fixed"),
        ('"balance", k_pos = 8', '"gvm", k_pos = 8', "history.version_decay must be < 1 for gvm"),
        ("n_max = 32, g", "n_max = 7, g", r"stages.0: strategy.n_max must be >= k_pos \+ k_neg = 8"),
        ('name = "balance", k_pos = 8', 'name = "balanced", k_pos = 8', "must be one of balance, .* got 'balanced'"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused_at_load(tmp_path, old, new, message) -> None:
    assert old in SCHEDULE
    with pytest.raises(ConfigError, match=message):
        make_policy(load(tmp_path, SCHEDULE.replace(old, new, 1)))


def test_a_run_without_a_last_step_may_have_stages_anywhere(tmp_path) -> None:
    config = load(tmp_path, SCHEDULE.replace("max_steps = 100", "max_steps = 0\nmax_train_s = 60.0"))
    assert [stage.from_step for stage in config.stages] == [20, 80]


STAGED_TEXT = SCHEDULE.replace('name = "positives"', 'name = "staged"').replace("from_step = 20", "from_step = 0")


def test_a_staged_run_is_covered_from_its_first_step_to_its_last(tmp_path) -> None:
    policy = make_policy(load(tmp_path, STAGED_TEXT))
    assert [policy.strategy_at(version) for version in (0, 79, 80)] == [MIDDLE, MIDDLE, LATE]
    for old, new, message in (
        ("from_step = 0", "from_step = 20", "stages.0.from_step must be 0 for strategy.name = staged, got 20"),
        ('strategy = { name = "balance", k_pos = 4', "selector = {}\nx = { k_pos = 4", "unknown key"),
        ("from_step = 80", "from_step = 100", "begin before run.max_steps = 100, got 100"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, STAGED_TEXT.replace(old, new))
    own = "[strategy]\nname = 'staged'\n[[stages]]\nfrom_step = 0\n"
    with pytest.raises(ConfigError, match=r"stages.0.strategy must be set for strategy.name = staged"):
        load(tmp_path, f"{own}selector = {{ name = 'mopps' }}")
    with pytest.raises(ConfigError, match="the stage from step 0 must set strategy or selector, got neither"):
        load(tmp_path, own)


@pytest.mark.parametrize("max_steps", [5, 12, 100, 401])
def test_staged_without_stages_is_the_seeds_schedule(tmp_path, max_steps) -> None:
    config = load(tmp_path, "", "strategy.name=staged", f"run.max_steps={max_steps}")
    policy, selection = make_policy(config), make_selection(config)
    second, third = max_steps // 5, 4 * max_steps // 5
    for version in range(max_steps):
        k = 1 if version < second else 4 if version < third else 8
        assert policy.strategy_at(version) == Balance(k, k, 8 * k, 2 * k)
        assert selection.pool(version) == (16 if version >= third else 0)
    assert selection.stages == (Stage(third, Curriculum(steps=max_steps - third), 100),)


@pytest.mark.parametrize("length", ["run.max_steps=4", "run.max_train_s=60"])
def test_the_seeds_schedule_needs_a_run_that_has_fifths(tmp_path, length) -> None:
    limits = ["run.max_steps=0", "run.max_train_s=60"] if "train" in length else [length]
    with pytest.raises(ConfigError, match=r"run.max_steps must be >= 5 for strategy.name = staged without \[\[stages"):
        load(tmp_path, "", "strategy.name=staged", *limits)


@pytest.mark.parametrize("text", [SCHEDULE, STAGED_TEXT, f"{SCHEDULE}selector = {{ name = 'greso' }}\n"])
def test_the_configuration_that_is_handed_to_the_children_is_the_same(tmp_path, text) -> None:
    config = load(tmp_path, text)
    assert load(tmp_path, dump_config(config)) == config


def test_an_arm_keeps_the_strategy_that_it_was_opened_with() -> None:
    dispatcher = Dispatcher(STAGED)
    strategies = []
    for number, version in enumerate((0, 1, 2, 4, 5, 9)):
        dispatcher.outbox.learner_version = version
        dispatcher.admit(prompt(number))
        strategies.append(dispatcher.arms[number].strategy)
    assert strategies == [EARLY, EARLY, MIDDLE, MIDDLE, LATE, LATE]
    assert [dispatcher.arms[number].budget for number in range(6)] == [8, 8, 32, 32, 64, 64]
    assert [arm.strategy for arm in dispatcher.arms.values()] == strategies


def score(dispatcher: Dispatcher, arm_id: int, index: int, *, is_right: bool):
    return dispatcher.score(arm_id, Sample(index, float(is_right), is_right, 0, 5, None))


def test_an_old_arm_ends_by_its_own_rule_after_a_stage_began() -> None:
    dispatcher = Dispatcher(Policy(Positives(1, 8, 2), FOREVER, stages=((1, Fixed(4, 4)),)))
    dispatcher.admit(prompt(0))
    assert dispatcher.next_launch().arm.arm_id == 0
    dispatcher.outbox.learner_version = 1
    dispatcher.admit(prompt(1))
    launches = [(launch.arm.arm_id, launch.index) for launch in iter(dispatcher.next_launch, None)]
    assert launches == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert score(dispatcher, 0, 0, is_right=True).reason == "solved"
    ends = [score(dispatcher, 1, index, is_right=index == 0) for index in range(4)]
    assert [end.reason if end else None for end in ends] == [None, None, None, "solved"]
    assert len(ends[-1].group.kept) == 4


def test_prompts_that_wait_for_a_window_open_with_the_stage_that_has_begun() -> None:
    class Windowed(Fixed):
        window = 3

    dispatcher = Dispatcher(Policy(Windowed(4, 4), FOREVER, stages=((1, EARLY),)))
    dispatcher.admit(prompt(0))
    dispatcher.admit(prompt(1))
    assert dispatcher.arms == {}
    dispatcher.outbox.learner_version = 1
    dispatcher.admit(prompt(2))
    assert [arm.strategy for arm in dispatcher.arms.values()] == [EARLY] * 3


def test_every_stage_of_a_run_trains_groups_of_its_own_size() -> None:
    policy = Policy(Fixed(4, 4), Bound(20, 8), stages=((3, Fixed(8, 8)), (6, Fixed(12, 12))))
    out = Driver(policy, bernoulli(0.5), slots=32, step_s=50.0).run(300)
    assert len(out.retirements) == 300
    trained = [(trained_at, len(group.kept)) for group, trained_at in out.groups]
    assert {size for _, size in trained} == {4, 8, 12}
    assert all(trained_at >= {4: 0, 8: 3, 12: 6}[size] for trained_at, size in trained)
