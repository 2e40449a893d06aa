"""Imports point one way, and the light packages stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "transformers", "deepspeed")
SEAMS = ("engine.core", "engine.wire", "engine.transport")


def _modules(package: str) -> list[str]:
    names = []
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not name.endswith("__main__")]


def test_the_import_contracts_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), ".importlinter.toml", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", ["configs", "metrics", "engine"])
def test_a_light_package_imports_nothing_heavy(package):
    code = (
        "import importlib, sys\n"
        f"for name in {_modules(package)!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("preset", ["quickstart", "sim", "gpu"])
def test_a_dry_run_prints_the_plan_without_importing_anything_heavy(preset):
    code = (
        "import sys\nfrom engine.serve import main\n"
        f"assert main(['--config', 'configs/{preset}.toml', '--dry-run']) == 0\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules]"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "slots" in result.stdout


def test_the_decision_core_runs_on_the_standard_library_alone():
    code = f"import importlib\nfor name in {_modules('engine/core')!r}: importlib.import_module(name)"
    # -S: without site-packages, any other import fails.
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", ["workers", "learner"])
def test_worker_and_learner_know_only_the_wire_of_the_engine(package):
    strangers = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            strangers += [f"{path.relative_to(ROOT)}: {name}" for name in names if _is_stranger(name)]
    assert strangers == []


def _is_stranger(name: str) -> bool:
    return name.split(".")[0] == "engine" and not any(f"{name}.".startswith(f"{seam}.") for seam in SEAMS)
