"""Selectors by stage: which one is in force, what the others learn meanwhile, and a feed that changes over."""

import asyncio

import pytest

from configs import Config
from engine.core.past import EMPTY, Past
from engine.core.prompts import visit_order
from engine.core.selectors import Candidate, Curriculum, Greso, Mopps, Selection, Stage, Uniform
from engine.datasets import PromptRow
from engine.prompt_feed import CHUNK_ROWS, PromptFeed
from engine.selection import make_selection
from tests.support import virtual_loop


class Watched:
    """Takes the last candidate, and writes down what it is asked and told."""

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.asked: list[tuple[int, int]] = []
        self.told: list[tuple[str, bool]] = []

    def choose(self, candidates, draw) -> int:
        self.asked.append((len(candidates), draw.version))
        return len(candidates) - 1

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        self.told.append((prompt_id, is_in_force))


def candidates(size: int) -> list[Candidate]:
    return [Candidate(f"p{number}", EMPTY) for number in range(size)]


def staged() -> tuple[Selection, Watched, Watched]:
    early, late = Watched(2), Watched(5)
    return Selection(early, stages=(Stage(10, late), Stage(20, early))), early, late


def test_the_selector_of_a_draw_follows_the_policy_version_and_counts_versions_from_its_own_start() -> None:
    selection, early, late = staged()
    sizes = {version: selection.pool(version) for version in (0, 9, 10, 19, 20, 99)}
    assert sizes == {0: 2, 9: 2, 10: 5, 19: 5, 20: 2, 99: 2}
    for version, size in sizes.items():
        assert selection.draw(candidates(size), version) == size - 1
    assert early.asked == [(2, 0), (2, 9), (2, 0), (2, 79)]
    assert late.asked == [(5, 0), (5, 9)]
    assert selection.max_pool == 5
    assert selection.num_passed_over == 4 * 1 + 2 * 4


def test_every_selector_is_told_of_every_visit_once_and_whether_it_was_in_force() -> None:
    selection, early, late = staged()
    for version in (0, 12, 25):
        selection.observe(f"p{version}", 1, 3, version)
    assert early.told == [("p0", True), ("p12", False), ("p25", True)]
    assert late.told == [("p0", False), ("p12", True), ("p25", False)]


def test_greso_knows_the_prompts_when_its_stage_begins_and_its_chances_have_not_moved() -> None:
    greso = Greso(adjust_every=1)
    selection = Selection(Uniform(), stages=(Stage(5, greso),))
    for _ in range(3):
        selection.observe("p0", 8, 0, version=0)
    assert greso.p_easy == 0.5
    assert greso.visit_chance("p0") == 0.125
    selection.observe("p0", 8, 0, version=5)
    assert greso.p_easy == 0.49


def test_a_bound_of_passes_is_that_of_the_stage_and_earlier_passes_count() -> None:
    class Last(Watched):
        """Never takes the first."""

    selection = Selection(Last(2), 0, stages=(Stage(1, Last(2), max_passes=3),))
    found = [selection.draw(candidates(2), version) for version in (0, 0, 0, 0, 1, 1)]
    assert found == [1, 1, 1, 1, 0, 1], "passed over four times without a bound: at once when there is one"


def test_a_visit_in_turn_ends_a_prompts_wait() -> None:
    selection = Selection(Watched(2), max_passes=2)
    assert [selection.draw(candidates(2), 0) for _ in range(2)] == [1, 1]
    selection.visit("p0")
    assert [selection.draw(candidates(2), 0) for _ in range(3)] == [1, 1, 0]


# --- configuration ------------------------------------------------------------------------------------------------


def built(*stages: dict, **selector) -> Selection:
    return make_selection(Config.model_validate({"run": {"max_steps": 90}, "selector": selector, "stages": stages}))


def test_a_stage_carries_a_selector_with_its_settings_and_without_one_changes_nothing() -> None:
    course = {"name": "curriculum", "max_passes": 7, "pool": 4, "curriculum": {"first": 0.9, "steps": 30}}
    selection = built({"from_step": 10, "strategy": {"k_pos": 3}}, {"from_step": 60, "selector": course}, name="mopps")
    assert selection.selector == Mopps()
    assert selection.stages == (Stage(60, Curriculum(4, 0.9, 0.25, 30), 7),)


def test_a_selector_that_comes_back_goes_on_with_its_state() -> None:
    greso = {"name": "greso"}
    selection = built({"from_step": 10, "selector": {"name": "mopps"}}, {"from_step": 20, "selector": greso}, **greso)
    assert selection.stages[1].selector is selection.selector
    other = built({"from_step": 10, "selector": {"name": "greso", "greso": {"p_easy": 0.4}}}, **greso)
    assert other.stages[0].selector is not other.selector


# --- the feed -----------------------------------------------------------------------------------------------------


class Letters:
    async def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        await asyncio.sleep(0.01)
        return [tuple(map(ord, text)) for text in texts]


def test_a_feed_changes_its_selector_with_the_version_and_loses_no_turn() -> None:
    rows = [PromptRow(f"p{number}", f"{number:04}", str(number), "all") for number in range(1000)]
    pasts = {f"p{number}": Past(number, 999 - number, 9) for number in range(1000)}
    course = Curriculum(pool=50, first=1.0, last=1.0)
    selection = Selection(Uniform(), stages=(Stage(1, course, 100), Stage(2, Uniform())))
    version, found, passed = [0], [], []
    changed = asyncio.Event()
    feed = PromptFeed(
        rows=rows, encoder=Letters(), seed=4, max_epochs=3, max_prompt_tokens=4, changed=changed.set,
        on_skipped=lambda _row: None, selection=selection, past_of=pasts.__getitem__, version=lambda: version[0],
        on_passed_over=passed.append,
    )  # fmt: skip

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run())
            while not feed.is_empty:
                changed.clear()
                prompt = feed.take()
                if prompt is None:
                    await changed.wait()
                else:
                    found.append(prompt.prompt_id)
                    version[0] = 0 if len(found) < 1000 else 1 if len(found) < 1020 else 2

    virtual_loop.run(main())
    turns = [f"p{row}" for _, row in visit_order(1000, 4, 3)]
    pools = [turns[1000 + 50 * draw : 1050 + 50 * draw] for draw in range(20)]
    assert found[:1000] == turns[:1000], "the first epoch in order"
    assert found[1000:1020] == [max(pool, key=lambda name: int(name[1:])) for pool in pools], "the easiest of each pool"
    assert found[1020:] == turns[2000:], "and the rest in order"
    assert sum(passed) == 20 * 49


@pytest.mark.parametrize(("pools", "largest"), [((0, 40), 40), ((40, 0), 40), ((3, 40, 5), 40), ((0,), 1)])
def test_the_buffer_fits_the_largest_pool_of_all_stages(pools, largest) -> None:
    first, *later = (Watched(pool) for pool in pools)
    selection = Selection(first, stages=tuple(Stage(number + 1, one) for number, one in enumerate(later)))
    rows = [PromptRow(f"p{number}", "text", "0", "all") for number in range(CHUNK_ROWS * 60)]
    feed = PromptFeed(
        rows=rows, encoder=Letters(), seed=0, max_epochs=1, max_prompt_tokens=4, changed=lambda: None,
        on_skipped=lambda _row: None, selection=selection,
    )  # fmt: skip

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run())
            await asyncio.sleep(100)
            assert len(feed._buffer) == CHUNK_ROWS * (largest + 1)
            feed.stop()

    virtual_loop.run(main())
