"""`python -m tests.integration.recorded_run PORT [--faults]`: a process that records a made-up run and serves /metrics.

For tests of what reads the metrics. Prompts, lengths and delays are seeded; time is real, 20 moments a second. With
`--faults` samples expire, workers restart, verifiers time out, updates fail.
"""

import asyncio
import random
import sys

from metrics.catalogue import LAGS, tier_of
from metrics.recorder import Recorder
from metrics.server import Health, MetricsServer

MOMENT_S = 0.05
LAG_NAMES = ("tokens", "ratio_p01", "ratio_p50", "ratio_p99", "clip_share", "ess_share", "kl_k1", "kl_k3")


class RecordedRun:
    """Feeds a recorder what an engine would."""

    def __init__(self, recorder: Recorder, faults: bool) -> None:
        self.recorder = recorder
        self.faults = faults
        self.random = random.Random(7)
        self.version = 0

    def moment(self, number: int) -> None:
        recorder = self.recorder
        for _ in range(4):
            self._arm()
        recorder.set_arms(sampling=40 + number % 9, waiting=number % 5, ready=16)
        recorder.in_flight(requests=120 + number % 9, slots=128)
        recorder.worker_up(2)
        recorder.verifier_queue(number % 4)
        recorder.loop_lag(abs(self.random.gauss(0.0, 0.002)))
        if number % 5 == 4:
            self._step()
        if self.faults:
            self._fault()

    def _arm(self) -> None:
        draw, recorder = self.random, self.recorder
        pass_rate = draw.choice((0.0, 0.08, 0.3, 0.6, 1.0))
        rights: list[bool] = []
        while len(rights) < 32 and (sum(rights) < 2 or len(rights) - sum(rights) < 2):
            rights.append(draw.random() < pass_rate)
        tokens = sum(draw.randint(8, 200) for _ in rights)
        recorder.first_sample_reward(float(rights[0]))
        for right in rights:
            recorder.verdict("correct" if right else "wrong", draw.expovariate(200.0))
        solved = 0 < sum(rights) < len(rights)
        recorder.arm_retired(
            "solved" if solved else "exhausted", tier_of(sum(rights), len(rights)), len(rights), tokens
        )
        recorder.generated(f"worker-{draw.randrange(2)}", tokens + 20, len(rights) + 1)
        kept = min(tokens, 300) if solved else 0
        recorder.tokens("trained", kept)
        recorder.tokens("counted", tokens - kept)
        recorder.tokens("aborted", 20)
        for outcome in ("sealed", "shipped", "trained") if solved else ("zero_signal",):
            recorder.group(outcome)

    def _step(self) -> None:
        draw, recorder = self.random, self.recorder
        self.version += 1
        for _ in range(16):
            recorder.staleness(draw.choice((0, 0, 1, 1, 2)), 4)
        step = {
            "loss": draw.gauss(0.0, 0.1),
            "entropy": 1.2,
            "kl_behaviour": 0.01,
            "clip_share": 0.02,
            "mask_share": 0.01,
            "kl_reference": 0.003,
            "mismatch_nats": 0.02,
            "mismatch_share": 0.04,
            "grad_norm": 0.8,
            "lr": 1e-5,
            "ratio_max": 1.4,
            "tokens_trained": 3000.0,
            "tokens_packed": 5000.0,
            "step_s": 0.2,
            "wait_s": 0.05,
            "max_staleness": 2.0,
            "mean_staleness": 0.8,
        }
        for number, lag in enumerate(LAGS[:-1]):
            values = (1000.0, 0.8, 1.0, 1.3, 0.02, 0.97 - 0.02 * number, 0.001, 0.002)
            step |= {f"lag/{lag}/{name}": value for name, value in zip(LAG_NAMES, values, strict=True)}
        step[f"lag/{LAGS[-1]}/tokens"] = 0.0
        recorder.step(self.version, step)
        recorder.weight_update(
            "ok", stage_s=0.2, pause_s=draw.uniform(0.2, 0.4), load_s=0.2, update_s=0.9, canary_max_nats=0.03
        )

    def _fault(self) -> None:
        recorder = self.recorder
        recorder.expired_samples(2, "right")
        recorder.expired_samples(1, "wrong")
        recorder.group("dropped_expired")
        recorder.tokens("failed", 50)
        recorder.verdict("timeout", 3.0)
        recorder.worker_restarted("worker-0")
        recorder.prompts(skipped=1, quarantined=1)
        recorder.weight_update("failed", stage_s=0.0, pause_s=0.0, load_s=0.0, update_s=0.0, canary_max_nats=4.0)


async def main(port: int, faults: bool) -> None:
    recorder = Recorder()
    recorder.info("0.0.0", "balance", "recorded")
    run = RecordedRun(recorder, faults)
    loop = asyncio.get_running_loop()
    async with MetricsServer(recorder.render, lambda: Health("ok", run.version, 0.0), port=port):
        # The parent ends this process; the range is its longest life.
        for number in range(round(300.0 / MOMENT_S)):
            due = loop.time() + MOMENT_S
            run.moment(number)
            await asyncio.sleep(due - loop.time())


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), "--faults" in sys.argv))
