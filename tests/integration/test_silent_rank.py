"""A rank that is stopped is alive and says nothing: it is named in seconds, and nothing stays behind."""

import signal
import time
from pathlib import Path

import numpy as np
import psutil

from engine.wire import Credit, WeightsPublished, WeightsReady
from tests.support.learner_inputs import random_group
from tests.support.learner_run import GROUPS, LearnerRun, torchrun
from tests.support.run_process import assert_gone

SHARED_MEMORY = Path("/dev/shm")
LAUNCHER = [*torchrun(2), "-m", "learner.train"]


def segments_of(process):
    return list(SHARED_MEMORY.glob(f"adastream-{process.pid}-*"))


async def stop_a_rank_and_step(run):
    """Both ranks; the second one is stopped while the first works on a step."""
    await run.next(WeightsReady)
    ranks = run.ranks()
    assert segments_of(ranks[0])
    ranks[1].send_signal(signal.SIGSTOP)
    await run.hub.send("learner", WeightsPublished(policy_version=0))
    await run.next(Credit)
    rng = np.random.default_rng(0)
    for number in range(GROUPS):
        await run.hub.send("learner", random_group(rng, number, version=0))
    return ranks


def wait_for_end(rank, within_s):
    rank.wait(within_s)
    assert segments_of(rank) == []


async def test_a_rank_that_is_stopped_before_a_step_is_named(tmp_path):
    # Ranks that start on busy cores must not look silent.
    settings = {"ranks": "2", "zero_stage": "2", "rank_deadline_s": "8.0"}
    async with LearnerRun(tmp_path, LAUNCHER, settings) as run:
        ranks = await stop_a_rank_and_step(run)
        stopped_at = time.monotonic()
        wait_for_end(ranks[0], 30.0)
        assert time.monotonic() - stopped_at < 25.0
        assert "rank 1 has not answered for" in run.log
        assert psutil.pid_exists(ranks[1].pid)
        ranks[1].kill()
        assert await run.exit_code() != 0
        assert_gone(ranks)


async def test_sigterm_removes_the_segments_though_another_rank_is_stopped(tmp_path):
    async with LearnerRun(tmp_path, LAUNCHER, {"ranks": "2", "zero_stage": "2"}) as run:
        ranks = await stop_a_rank_and_step(run)
        ranks[0].send_signal(signal.SIGTERM)
        wait_for_end(ranks[0], 30.0)
        ranks[1].kill()
        assert await run.exit_code() != 0
        assert_gone(ranks)
