"""The feed: order, turns and epochs with each selector, and who is woken."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from engine.core.arm import Prompt
from engine.core.errors import DataError
from engine.core.past import History
from engine.core.prompts import visit_order
from engine.core.selectors import Curriculum, Greso, Mopps, Selection, Uniform
from engine.datasets import PromptRow
from engine.prompt_feed import CHUNK_ROWS, PromptFeed
from engine.wire import Position
from tests.support import virtual_loop

Visit = Callable[[PromptFeed, Prompt], None]


class Letters:
    """Encodes a text as one token a letter, some time later."""

    def __init__(self) -> None:
        self.num_texts = 0

    async def encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        self.num_texts += len(texts)
        await asyncio.sleep(0.01)
        return [tuple(map(ord, text)) for text in texts]


def feed(num_rows: int, max_epochs: int, selection: Selection | None = None, **choices) -> PromptFeed:
    rows = [PromptRow(f"p{number}", f"{number:03}", str(number), "all") for number in range(num_rows)]
    if selection is not None:
        choices["selection"] = selection
    settings = {"rows": rows, "encoder": Letters(), "seed": 4, "max_prompt_tokens": 3, "on_skipped": lambda _row: None}
    return PromptFeed(max_epochs=max_epochs, changed=lambda: None, **{**settings, **choices})


def drain(given: PromptFeed, visit: Visit = lambda _feed, _prompt: None) -> list[str]:
    """Everything the feed hands out; under virtual time a feed that leaves its taker waiting is a deadlock."""

    async def main() -> list[str]:
        changed, found = asyncio.Event(), []
        given.changed = changed.set
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(given.run())
            while not given.is_empty:
                changed.clear()
                prompt = given.take()
                if prompt is None:
                    await changed.wait()
                else:
                    found.append(prompt.prompt_id)
                    visit(given, prompt)
        return found

    return virtual_loop.run(main())


def order(num_rows: int, max_epochs: int, seed: int = 4) -> list[str]:
    return [f"p{row}" for _, row in visit_order(num_rows, seed, max_epochs)]


def test_the_uniform_selector_hands_out_the_visit_order_bit_for_bit() -> None:
    def never(_prompt_id: str):
        raise AssertionError("a past was looked up")

    given = feed(700, 3, Selection(Uniform(), max_passes=100), past_of=never)
    assert drain(given) == order(700, 3)
    assert given.selection.num_draws == 0


def test_without_a_selection_the_order_is_that_of_the_uniform_selector() -> None:
    assert drain(feed(300, 2)) == order(300, 2)


@pytest.mark.parametrize("pool", [2, 16, 50])
@pytest.mark.parametrize("kind", [Mopps, Curriculum])
def test_one_of_each_pool_is_visited_and_the_others_turns_are_over(kind, pool: int) -> None:
    passed: list[int] = []
    given = feed(30, 20, Selection(kind(pool=pool), max_passes=100), on_passed_over=passed.append)
    visits = drain(given)
    assert len(visits) == -(-600 // pool)
    assert len(visits) + sum(passed) == 600 == given.selection.num_draws + given.selection.num_passed_over
    turns = order(30, 20)
    pools = [turns[start : start + pool] for start in range(0, 600, pool)]
    assert all(visited in turn for visited, turn in zip(visits, pools, strict=True))


def test_greso_gives_each_prompt_as_many_turns_as_there_are_epochs() -> None:
    passed: Counter[str] = Counter()

    class Watched(Greso):
        def choose(self, candidates, draw) -> int | None:
            chosen = super().choose(candidates, draw)
            passed.update(candidate.prompt_id for candidate in candidates if chosen is None)
            return chosen

    given = feed(40, 25, Selection(Watched(), max_passes=0))
    visits = Counter(drain(given, lambda one, prompt: one.selection.observe(prompt.prompt_id, 4, 0, version=0)))
    assert all(visits[f"p{number}"] + passed[f"p{number}"] == 25 for number in range(40))
    assert passed.total() > visits.total(), "always right: most turns are skipped"
    assert min(visits.values()) >= 1


def test_greso_skips_nobody_in_the_first_epoch_and_no_prompt_with_spread_later() -> None:
    given = feed(500, 4, Selection(Greso(), max_passes=100))

    def visit(one: PromptFeed, prompt: Prompt) -> None:
        is_mixed = int(prompt.prompt_id[1:]) % 2
        one.selection.observe(prompt.prompt_id, 4, 4 if is_mixed else 0, version=0)

    visits = drain(given, visit)
    assert visits[:500] == order(500, 4)[:500]
    found = Counter(visits)
    assert all(found[f"p{number}"] == 4 for number in range(1, 500, 2))
    assert sum(found[f"p{number}"] for number in range(0, 500, 2)) < 3 * 250


def test_mopps_comes_to_visit_the_prompts_of_medium_difficulty() -> None:
    history = History()
    given = feed(80, 120, Selection(Mopps(pool=8), max_passes=0), past_of=lambda name: history.past(name, 0))

    def visit(_one: PromptFeed, prompt: Prompt) -> None:
        right = {0: 0, 1: 4, 2: 8, 3: 8}[int(prompt.prompt_id[1:]) % 4]
        history.record(prompt.prompt_id, right, 8 - right, 0)

    late = drain(given, visit)[-600:]
    assert sum(int(name[1:]) % 4 == 1 for name in late) / 600 > 0.9, "a quarter of the prompts"


def test_the_curriculum_follows_the_policy_version() -> None:
    history, version = History(), [0]
    for number in range(40):
        history.record(f"p{number}", number * 10, (39 - number) * 10, 0)
    given = feed(
        40,
        100,
        Selection(Curriculum(pool=8, first=0.9, last=0.1, steps=500), max_passes=1000),
        past_of=lambda name: history.past(name, version[0]),
        version=lambda: version[0],
    )
    levels: list[int] = []

    def visit(_one: PromptFeed, prompt: Prompt) -> None:
        levels.append(int(prompt.prompt_id[1:]))
        version[0] += 1

    drain(given, visit)
    assert sum(levels[:100]) / 100 > 28
    assert sum(levels[-100:]) / 100 < 11


class Nobody:
    """Takes nobody after the first `num_first` draws."""

    pool = 1

    def __init__(self, num_first: int) -> None:
        self.num_first = num_first

    def choose(self, _candidates, _draw) -> int | None:
        self.num_first -= 1
        return 0 if self.num_first >= 0 else None

    def observe(self, prompt_id: str, right: int, wrong: int, *, is_in_force: bool = True) -> None:
        pass


@pytest.mark.parametrize("num_first", [0, 1, 300, 1500])
def test_a_taker_is_woken_when_every_turn_that_is_left_is_passed_over(num_first: int) -> None:
    given = feed(1000, 2, Selection(Nobody(num_first)))
    assert len(drain(given)) == num_first
    assert given.is_empty
    assert given.selection.num_passed_over == 2000 - num_first


def test_the_owner_is_told_when_the_last_turns_are_passed_over() -> None:
    calls: list[bool] = []
    given = feed(10, 1, Selection(Nobody(0)))

    async def main() -> None:
        await given.run()
        given.changed = lambda: calls.append(given.is_empty)
        assert given.take() is None
        assert given.take() is None

    virtual_loop.run(main())
    assert calls == [True], "once, after the last one"


def test_a_pool_is_whole_while_the_order_goes_on() -> None:
    sizes: list[int] = []

    class Watched(Mopps):
        def choose(self, candidates, draw) -> int:
            sizes.append(len(candidates))
            return 0

    drain(feed(1000, 1, Selection(Watched(pool=24))))
    assert sizes == [24] * 41 + [16]


def test_the_buffer_holds_a_chunk_of_draws_and_waits_for_takers() -> None:
    for selection, least in ((None, CHUNK_ROWS), (Selection(Mopps(pool=4)), 4 * CHUNK_ROWS)):
        given = feed(5000, 1, selection, max_prompt_tokens=4)

        async def main(one: PromptFeed = given) -> int:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(one.run())
                await asyncio.sleep(100)
                held = one.encoder.num_texts
                one.stop()
            return held

        assert virtual_loop.run(main()) == least + CHUNK_ROWS


def test_a_prompt_that_came_back_has_one_more_turn_in_its_epoch() -> None:
    visits = Counter(drain(feed(10, 1), lambda one, prompt: one.put_back(prompt)))
    assert visits == {f"p{number}": 2 for number in range(10)}


def test_a_prompt_may_come_back_again_in_a_later_epoch() -> None:
    given = feed(600, 5)
    visits = Counter(drain(given, lambda one, prompt: one.put_back(prompt) if prompt.prompt_id == "p0" else None))
    # The buffer runs ahead of the visits, so the last epochs are buffered when the first of them begins.
    assert 5 + 3 <= visits["p0"] <= 5 + 5
    assert visits["p1"] == 5


def test_quarantined_and_too_long_prompts_are_left_out() -> None:
    skipped: list[str] = []
    given = feed(1002, 2, on_skipped=lambda row: skipped.append(row.prompt_id))
    given.quarantined.add("p7")
    visits = drain(given)
    assert skipped == [name for name in order(1002, 1) if name in ("p1000", "p1001")]
    assert visits == [name for name in order(1002, 2) if name not in ("p7", "p1000", "p1001")]


def test_a_data_set_without_a_prompt_that_fits_is_an_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        drain(feed(5, 1, max_prompt_tokens=2))
    assert caught.group_contains(DataError, match="none of the 5 training prompts fits into 2 tokens")


@pytest.mark.parametrize("num_taken", [0, 1, 299, 700, 1111])
def test_a_feed_goes_on_from_any_position_with_the_unsettled_turns_first(num_taken: int) -> None:
    turns = order(700, 2)
    given = feed(700, 2)

    class Enough(Exception):
        pass

    taken: list[Prompt] = []

    def visit(_feed: PromptFeed, prompt: Prompt) -> None:
        taken.append(prompt)
        if len(taken) == num_taken:
            raise Enough

    if num_taken:
        with pytest.raises(ExceptionGroup):
            drain(given, visit)
    assert [prompt.turn for prompt in taken] == list(range(num_taken))
    unsettled = [turn for turn in (0, 5, 298, 699, 705) if turn < num_taken]
    position = given.position(unsettled, num_arms=3)
    assert position == Position(num_taken, unsettled, [], 3, given.order)
    again = feed(700, 2)
    assert again.begin_at(position)
    assert again.position([], 3) == position
    assert drain(again) == [*(turns[turn] for turn in unsettled), *turns[num_taken:]]


def test_more_unsettled_turns_than_a_chunk_stay_unsettled_until_they_are_handed_out() -> None:
    unsettled = list(range(0, 900, 2))
    given = feed(700, 2)
    given.begin_at(Position(900, unsettled, [901, 903], 0, given.order))
    left = set(unsettled)

    def visit(current: PromptFeed, prompt: Prompt) -> None:
        left.discard(prompt.turn)
        position = current.position([], 0)
        assert position.next_turn == max(900, prompt.turn + 1)
        assert position.open_turns == sorted(left)
        assert position.done_turns == [turn for turn in (901, 903) if turn >= position.next_turn]

    found = drain(given, visit)
    later = [turn for turn in range(900, 1400) if turn not in (901, 903)]
    turns = order(700, 2)
    assert found == [turns[turn] for turn in [*unsettled, *later]]


def test_a_prompt_that_came_back_is_unsettled_until_it_is_handed_out_again() -> None:
    given = feed(40, 1)
    seen: list[list[int]] = []

    def visit(current: PromptFeed, prompt: Prompt) -> None:
        if prompt.turn == 7:
            current.put_back(prompt)
        seen.append(current.position([], 0).open_turns)

    drain(given, visit)
    assert seen == [[]] * 7 + [[7]] * 33 + [[]]


@pytest.mark.parametrize("other", [{"seed": 5}, {"rows": 41}])
def test_a_position_of_another_order_is_refused(other: dict) -> None:
    position = feed(40, 1).position([], 0)
    given = feed(other.get("rows", 40), 1, **({"seed": 5} if "seed" in other else {}))
    assert not given.begin_at(position)
    assert given.position([], 0).next_turn == 0


def test_passed_over_turns_are_settled() -> None:
    given = feed(64, 1, Selection(Mopps(pool=16)))
    positions: list[Position] = []
    drain(given, lambda current, _prompt: positions.append(current.position([], 0)))
    assert [(position.next_turn, position.open_turns) for position in positions] == [
        (16, []),
        (32, []),
        (48, []),
        (64, []),
    ]
