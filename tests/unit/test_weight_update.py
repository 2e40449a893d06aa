"""A version is published only when every live worker runs it verified; a worker that fails is fenced, others go on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from configs.training import Weights
from engine.core.errors import PeerLost
from engine.fleet import Fleet
from engine.weight_update import WeightUpdater
from engine.wire import PROTOCOL_VERSION, Applied, ApplyWeights, Hello, Manifest, Message, Staged, StageWeights
from metrics.recorder import Recorder
from tests.support import virtual_loop

Answer = Callable[[Message], Message | None]


def manifest(version: int) -> Manifest:
    return Manifest(version, "none", "", 0, [], [])


def good(message: Message) -> Message:
    if isinstance(message, StageWeights):
        return Staged(policy_version=message.manifest.policy_version)
    assert isinstance(message, ApplyWeights)
    return Applied(policy_version=message.policy_version, canary_max_nats=0.02, pause_s=0.1)


def failing_canary(message: Message) -> Message:
    answer = good(message)
    if isinstance(answer, Applied) and answer.policy_version:
        answer.error = "canary 3.0 nats > 0.1"
    return answer


def refusing(message: Message) -> Message:
    answer = good(message)
    if isinstance(answer, Staged) and answer.policy_version:
        answer.error = "tensor lm_head.weight is missing"
    return answer


def silent(message: Message) -> Message | None:
    return None if isinstance(message, ApplyWeights) and message.policy_version else good(message)


@dataclass
class Bench:
    """An updater with scripted workers instead of a hub."""

    answers: dict[str, Answer]
    published: list[int] = field(default_factory=list)
    fenced: list[tuple[str, str]] = field(default_factory=list)
    sent: list[tuple[str, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = Fleet()
        config = Weights(stage_deadline_s=5, apply_deadline_s=5)
        self.updater = WeightUpdater(self, self.fleet, config, Recorder(), self._publish, self._fence, lambda: None)

    async def send(self, worker: str, message: Message, deadline_s: float = 30.0) -> None:
        self.sent.append((worker, message))
        if worker not in self.fleet.workers:
            raise PeerLost(worker)
        answer = self.answers[worker](message)
        if answer is not None:
            asyncio.get_running_loop().call_later(0.1, self.updater.on_answer, worker, answer)

    async def _publish(self, version: int) -> None:
        self.published.append(version)

    async def _fence(self, worker: str, cause: str) -> None:
        self.fenced.append((worker, cause))
        self.fleet.leave(worker)

    def join(self, worker: str) -> None:
        self.fleet.join(Hello(protocol=PROTOCOL_VERSION, role="worker", name=worker, life="a", pid=1, slots=1))
        self.updater.on_joined(worker)

    def play(self, *script: Callable[[], None], pause_s: float = 20.0) -> None:
        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(self.updater.run())
                for line in script:
                    line()
                    await asyncio.sleep(pause_s)
                task.cancel()

        virtual_loop.run(main())


def test_the_first_version_is_verified_without_loading_and_measures_the_noise() -> None:
    bench = Bench({"a": good})
    bench.play(lambda: bench.join("a"), lambda: bench.updater.on_manifest(manifest(0)))
    applied = [m for _, m in bench.sent if isinstance(m, ApplyWeights)]
    assert [m.load for m in applied] == [False]
    assert bench.published == [0]
    assert bench.updater.history.noise_nats == 0.02
    assert bench.fleet.live[0].name == "a"


@pytest.mark.parametrize(
    ("answer", "words"),
    [(failing_canary, "canary 3.0 nats"), (refusing, "lm_head.weight is missing"), (silent, "within 5 s")],
)
def test_a_failing_worker_is_fenced_and_the_others_go_on(answer: Answer, words: str) -> None:
    bench = Bench({"a": good, "b": answer})
    bench.play(
        lambda: (bench.join("a"), bench.join("b")),
        lambda: bench.updater.on_manifest(manifest(0)),
        lambda: bench.updater.on_manifest(manifest(1)),
    )
    assert [worker for worker, _ in bench.fenced] == ["b"]
    assert words in bench.fenced[0][1]
    assert bench.published == [0, 1]
    assert [(w.name, w.policy_version) for w in bench.fleet.live] == [("a", 1)]


@pytest.mark.parametrize(
    ("first_nats", "is_fenced", "next_limit"), [(0.05, False, 0.2), (0.01, False, 0.1), (0.5, True, None)]
)
def test_the_first_version_of_a_resumed_run_is_loaded_checked_and_gives_the_noise(
    first_nats: float, is_fenced: bool, next_limit: float | None
) -> None:
    def answer(message: Message) -> Message:
        given = good(message)
        if isinstance(given, Applied) and isinstance(message, ApplyWeights):
            given.canary_max_nats = first_nats if message.policy_version == 7 else 0.02
            is_over = given.canary_max_nats > message.canary_limit_nats
            given.error = "canary over the limit" if is_over else ""
        return given

    bench = Bench({"a": answer})
    bench.play(
        lambda: bench.join("a"),
        lambda: bench.updater.on_manifest(manifest(7)),
        lambda: bench.updater.on_manifest(manifest(8)),
    )
    applied = [m for _, m in bench.sent if isinstance(m, ApplyWeights)]
    assert (applied[0].policy_version, applied[0].load) == (7, True)
    assert applied[0].canary_limit_nats == pytest.approx(0.4)
    assert bool(bench.fenced) == is_fenced
    if not is_fenced:
        assert bench.published == [7, 8]
        assert bench.updater.history.noise_nats == first_nats
        assert applied[1].canary_limit_nats == pytest.approx(next_limit)


def test_nothing_is_published_while_no_worker_is_live() -> None:
    bench = Bench({"a": failing_canary})
    seen: list[int] = []
    bench.play(
        lambda: bench.join("a"),
        lambda: bench.updater.on_manifest(manifest(0)),
        lambda: bench.updater.on_manifest(manifest(1)),
        lambda: seen.extend(bench.published),
        lambda: (bench.answers.update(a=good), bench.join("a")),
    )
    assert seen == [0]
    assert bench.published == [0, 1]


def test_a_late_worker_is_brought_to_the_current_version_before_it_is_live() -> None:
    bench = Bench({"a": good, "b": good})
    bench.play(
        lambda: bench.join("a"),
        lambda: bench.updater.on_manifest(manifest(0)),
        lambda: bench.updater.on_manifest(manifest(1)),
        lambda: bench.join("b"),
    )
    loads = [(w, m.policy_version, m.load) for w, m in bench.sent if isinstance(m, ApplyWeights)]
    assert loads == [("a", 0, False), ("a", 1, True), ("b", 1, True)]
    assert bench.published == [0, 1]
    assert bench.fleet.generation_version == 1


def test_the_canary_limit_follows_the_measured_noise() -> None:
    bench = Bench({"a": lambda m: Applied(policy_version=m.policy_version, canary_max_nats=0.5)
                   if isinstance(m, ApplyWeights) else good(m)})  # fmt: skip
    bench.play(
        lambda: bench.join("a"),
        lambda: bench.updater.on_manifest(manifest(0)),
        lambda: bench.updater.on_manifest(manifest(1)),
    )
    limits = [m.canary_limit_nats for _, m in bench.sent if isinstance(m, ApplyWeights)]
    assert limits == [float("inf"), pytest.approx(4 * 0.5)]


def test_a_worker_that_leaves_in_between_holds_up_nobody() -> None:
    bench = Bench({"a": good, "b": silent})
    bench.play(
        lambda: (bench.join("a"), bench.join("b")),
        lambda: bench.updater.on_manifest(manifest(0)),
        lambda: bench.updater.on_manifest(manifest(1)),
        lambda: (bench.fleet.leave("b"), bench.updater.on_worker_lost("b")),
        pause_s=2.0,
    )
    assert bench.published == [0, 1]
    assert bench.fenced == []
