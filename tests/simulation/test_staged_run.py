"""The seeds' schedule, K = 1, 4, 8 and a curriculum at the end, through the real scheduler under virtual time."""

import json
from pathlib import Path

from configs import Config
from tests.support.whole_run import WholeRun


def test_each_part_of_the_seeds_schedule_samples_and_selects_by_its_own_rule(tmp_path: Path) -> None:
    run = WholeRun(
        Config.model_validate(
            {
                "run": {"name": "staged", "max_steps": 20, "seed": 3},
                "strategy": {"name": "staged"},
                "model": {"max_context_tokens": 4096},
                "data": {"train": "simulated:400", "test": "", "max_epochs": 100},
                "sampling": {"max_tokens": 2048},
                "worker": {"kind": "simulated", "count": 2, "slots": 32},
                "simulated": {"tokens_per_s": 100.0, "step_s": 2.0},
                "staleness": {"max": 4},
                "learner": {"kind": "simulated", "groups_per_step": 8},
                "server": {"live": "none"},
            }
        ),
        tmp_path,
    )
    summary = run.run()
    assert summary["steps"] == 20
    assert summary["tokens_missing"] == 0
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    arms: dict[int, list[dict]] = {}
    for row in rows:
        arms.setdefault(row["arm"], []).append(row)
    solved = {arm: pool for arm, pool in sorted(arms.items()) if pool[0]["reason"] == "solved"}
    sizes = {arm: sum(row["kept"] for row in pool) for arm, pool in solved.items() if pool[0]["outcome"] == "sealed"}
    assert set(sizes.values()) == {2, 8, 16}, "K right and K wrong ones"
    assert list(sizes.values()) == sorted(sizes.values()), "arms are opened in order, each by the rule of its version"
    begins = {size: min(solved[arm][0]["learner_version"] for arm in sizes if sizes[arm] == size) for size in (8, 16)}
    assert begins[8] >= 4
    assert begins[16] >= 16
    first_of_last = min(arm for arm, size in sizes.items() if size == 16)
    selection = run.coordinator.exchange.feed.selection
    assert selection.num_draws >= max(arms) - first_of_last > 0, "every prompt of the last part was drawn"
    assert selection.num_passed_over == 15 * selection.num_draws
    assert selection.num_draws < max(arms) / 2, "and none before it"
