"""The verifier pool with real child processes: verdicts, deadlines, deaths, and no orphan."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from configs.inputs import Verifier
from engine.core.errors import RunError
from engine.verifiers import InlineGrader, VerifierPool

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "data" / "verifier_cases.jsonl"
TOWER = "\\boxed{9^{9^{9}}}"
"""A tower of powers: keeps math-verify busy until somebody stops it."""
NUMERIC = Verifier(name="numeric")


@pytest.fixture(autouse=True)
def _no_child_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert left == []


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_verdicts_of_many_concurrent_callers_belong_to_their_requests():
    async with VerifierPool(NUMERIC.model_copy(update={"processes": 2})) as pool, asyncio.TaskGroup() as tasks:
        right = [tasks.create_task(pool.grade(f"it is {i}", str(i))) for i in range(1000)]
        wrong = [tasks.create_task(pool.grade(f"it is {i}", str(i + 1))) for i in range(1000)]
        none = [tasks.create_task(pool.grade("no idea", str(i))) for i in range(10)]
    assert {task.result() for task in right} == {"correct"}
    assert {task.result() for task in wrong} == {"wrong"}
    assert {task.result() for task in none} == {"unparsed"}
    statistics = pool.statistics()
    assert statistics.verdicts == {"correct": 1000, "wrong": 1000, "unparsed": 10}
    assert (statistics.kills, statistics.deaths, statistics.queue_length, statistics.busy) == (0, 0, 0, 0)
    assert statistics.work_s > 0.0


async def _until(predicate: Callable[[], bool]) -> None:
    """Turn the loop until the predicate holds: what happens in a child cannot wake us."""
    async with asyncio.timeout(20):
        while not predicate():  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0.001)


async def test_a_child_that_cannot_be_interrupted_is_killed_in_time_and_the_pool_goes_on():
    async with VerifierPool(Verifier(deadline_s=0.5, max_attempts=1)) as pool:
        (first_pid,) = pool.pids
        # Like one endless big-integer power: no alarm inside the process is heard.
        os.kill(first_pid, signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        began_at, ended_at = loop.time(), []
        async with asyncio.TaskGroup() as tasks:
            stuck = tasks.create_task(pool.grade("7", "7"))
            stuck.add_done_callback(lambda _: ended_at.append(loop.time()))
            queued = tasks.create_task(pool.grade("8", "8"))
        assert stuck.result() == "timeout"
        assert 0.5 <= ended_at[0] - began_at < 2.0
        # Its deadline began when the replacement took it up: the time in the queue is not its own.
        assert queued.result() == "correct"
        assert _gone(first_pid)
        assert pool.statistics().kills == 1
        assert pool.statistics().verdicts == {"timeout": 1, "correct": 1}


async def test_a_kill_is_tried_again_before_it_is_reported():
    async with VerifierPool(Verifier(deadline_s=0.3, max_attempts=2)) as pool:
        os.kill(pool.pids[0], signal.SIGSTOP)
        assert await pool.grade("7", "7") == "correct"
        statistics = pool.statistics()
    assert (statistics.kills, statistics.retries) == (1, 1)
    assert statistics.verdicts == {"correct": 1}


@pytest.mark.skipif(not CASES.exists(), reason="the verifier cases are not beside the repository")
async def test_the_known_hanging_answers_get_a_verdict_within_the_deadline():
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    cases = [case for case in cases if "hang" in case["note"]]
    config = Verifier(name="math", deadline_s=2.0, max_attempts=1)
    verdicts = []
    async with VerifierPool(config) as pool:
        for case in cases:
            verdicts.append(await pool.grade(f"${case['prediction']}$", case["gold"]))
            assert await pool.grade("\\boxed{7}", "7") == "correct"
        statistics = pool.statistics()
    assert len(cases) == 3
    assert "timeout" in verdicts
    assert statistics.work_s < len(cases) * (2.0 + 1.0) + 3.0


async def test_the_alarm_inside_the_child_spares_it_the_kill():
    async with VerifierPool(Verifier(name="math", deadline_s=1.0, max_attempts=2)) as pool:
        pids = pool.pids
        assert await pool.grade(TOWER, "1") == "timeout"
        assert pool.pids == pids
        assert (pool.statistics().kills, pool.statistics().retries) == (0, 1)
        assert await pool.grade("\\boxed{7}", "7") == "correct"


async def test_a_child_that_dies_at_work_costs_an_attempt_and_no_verdict():
    async with VerifierPool(Verifier(name="math", deadline_s=30.0, max_attempts=1)) as pool:
        (pid,) = pool.pids
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(pool.grade(TOWER, "1"))
            await _until(lambda: pool.statistics().busy == 1)
            os.kill(pid, signal.SIGKILL)
        assert task.result() == "crashed"
        assert pool.statistics().deaths == 1
        assert await pool.grade("\\boxed{7}", "7") == "correct"


async def test_a_child_that_dies_while_idle_is_replaced_unseen():
    async with VerifierPool(NUMERIC) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        await _until(lambda: _gone(pid))
        assert await pool.grade("7", "7") == "correct"
        assert pool.pids != (pid,)


async def test_a_reference_that_cannot_be_judged_is_crashed_and_never_wrong():
    async with VerifierPool(NUMERIC) as pool:
        assert await pool.grade("7", "seven") == "crashed"
        assert pool.statistics().deaths == 0


async def test_a_caller_that_goes_away_leaves_the_pool_working():
    async with VerifierPool(Verifier(name="math", deadline_s=1.0, max_attempts=1)) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.grade(TOWER, "1")
        assert await pool.grade("\\boxed{7}", "7") == "correct"


async def test_a_child_is_replaced_after_its_share_of_verdicts():
    async with VerifierPool(NUMERIC, recycle_after=5) as pool:
        (first,) = pool.pids
        for i in range(6):
            assert await pool.grade(str(i), str(i)) == "correct"
        assert _gone(first)
        assert pool.statistics().deaths == 0


async def test_text_that_is_no_utf8_gets_a_verdict():
    async with VerifierPool(NUMERIC) as pool:
        assert await pool.grade("\ud800 7", "7") == "correct"


async def test_every_verdict_is_observed_with_its_work():
    seen: list[tuple[str, float]] = []
    async with VerifierPool(NUMERIC, observe=lambda verdict, work_s: seen.append((verdict, work_s))) as pool:
        await pool.grade("7", "7")
    assert [verdict for verdict, _ in seen] == ["correct"]
    assert 0.0 < seen[0][1] < 1.0


async def test_an_interpreter_that_cannot_grade_is_named_at_the_start():
    with pytest.raises(RunError, match=r"verifier 'numeric' did not start: .*exit code"):
        async with VerifierPool(NUMERIC, python="/bin/false"):
            pass
    with pytest.raises(RunError, match="could not be started"):
        async with VerifierPool(NUMERIC, python="/nonexistent/python"):
            pass


async def test_a_child_that_cannot_be_replaced_ends_the_block_with_its_cause(tmp_path):
    broken = tmp_path / "broken"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ -e {broken} ] && exit 9\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)

    async def scenario() -> None:
        async with VerifierPool(NUMERIC, python=str(python)) as pool:
            broken.touch()
            os.kill(pool.pids[0], signal.SIGKILL)
            await pool.grade("7", "7")

    with pytest.raises(RunError, match="could not be started again: verifier process ended with exit code 9"):
        await scenario()


async def test_a_closed_pool_refuses_work():
    async with VerifierPool(NUMERIC) as pool:
        pass
    with pytest.raises(RunError, match="was closed"):
        await pool.grade("7", "7")


async def test_a_cancelled_start_leaves_no_child():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), VerifierPool(Verifier(name="math", processes=3)):
            pytest.fail("a child of this grader cannot be ready so soon")


async def test_an_error_in_the_block_comes_out_as_it_is():
    with pytest.raises(KeyError):
        async with VerifierPool(NUMERIC):
            raise KeyError("cause")


async def test_waiting_callers_are_told_when_the_pool_closes():
    async with asyncio.TaskGroup() as tasks:
        pool = VerifierPool(Verifier(name="math", deadline_s=60.0))
        async with pool:
            waiting = [tasks.create_task(_outcome(pool)) for _ in range(3)]
            await _until(lambda: pool.statistics().queue_length == 2)
    assert [task.result() for task in waiting] == ["the verifier pool was closed before the verdict"] * 3


async def _outcome(pool: VerifierPool) -> str:
    try:
        return await pool.grade(TOWER, "1")
    except RunError as exc:
        return str(exc)


def test_children_die_with_a_killed_parent_even_at_work():
    code = (
        "import asyncio, sys\n"
        "from configs.inputs import Verifier\n"
        "from engine.verifiers import VerifierPool\n"
        "async def main():\n"
        "    async with VerifierPool(Verifier(name='math', deadline_s=600.0)) as pool:\n"
        "        sys.stdout.write(f'{pool.pids[0]}\\n'); sys.stdout.flush()\n"
        f"        await pool.grade({TOWER!r}, '1')\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(timeout=10)
    assert _gone(child.pid)


async def test_numeric_verdicts_are_fast_enough_for_the_fastest_worker():
    async with VerifierPool(NUMERIC) as pool:
        began_at = time.perf_counter()
        for i in range(2000):
            await pool.grade(f"so it must be {i}", str(i))
        rate = 2000 / (time.perf_counter() - began_at)
    # 8,000 to 20,000 a second on an idle core of a small machine; this leaves room for busy ones.
    assert rate > 1000


async def test_an_inline_grader_calls_its_function():
    grader = InlineGrader(lambda text, answer: "correct" if text == answer else "wrong")
    assert [await grader.grade("a", "a"), await grader.grade("a", "b")] == ["correct", "wrong"]
