"""`--dry-run` prints the resolved plan at once, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.name for path in (ROOT / "configs").glob("*.toml"))

PROGRAM = """
import sys
from engine.serve import main
code = main(sys.argv[1:])
heavy = {"torch", "vllm", "transformers"} & set(sys.modules)
sys.exit(code or (3 if heavy else 0))
"""


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_prints_its_plan_without_importing_torch(preset: str) -> None:
    command = [sys.executable, "-c", PROGRAM, "--config", f"configs/{preset}", "--dry-run", "sampling.max_tokens=20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("slots", "arms", "B  ", "η  ", "max_tokens = 20", "cores"):
        assert word in done.stdout


def test_the_plan_names_what_follows_from_the_bound() -> None:
    command = [sys.executable, "-m", "engine.serve", "--config", "configs/sim.toml", "--dry-run", "staleness.max=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "strictly on-policy" in done.stdout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy.futility=auto", "arms whose exit has a chance under 0.2"),
        ("strategy.futility=expired", "arms that lost samples to expiry and whose"),
        ("strategy.futility=optimal", "no way of going on is worth its samples"),
        ("staleness.max=1000000", "never: every arm gets its whole budget"),
    ],
)
def test_the_plan_says_which_arms_are_given_up(override: str, words: str) -> None:
    command = [sys.executable, "-m", "engine.serve", "--config", "configs/sim.toml", "--dry-run", override]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert words in done.stdout


@pytest.mark.parametrize("dry", [("--dry-run",), ()], ids=["plan", "start"])
def test_what_the_learner_will_lack_is_said_before_anything_starts(tmp_path: Path, dry: tuple[str, ...]) -> None:
    overrides = ("learner.kind=torch", "loss.kl.weight=0.1", f"loss.kl.reference={tmp_path / 'absent'}")
    command = [sys.executable, "-c", PROGRAM, "--config", "configs/sim.toml", *dry, f"run.folder={tmp_path}"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"error: loss.kl.reference {tmp_path / 'absent'} does not exist; learner.prepare makes the quickstart's model\n"
    )
    assert list(tmp_path.iterdir()) == []
