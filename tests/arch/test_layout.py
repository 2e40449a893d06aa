"""Where code may live and how large a piece may be."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "metrics", "engine", "workers", "learner")
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 6

VENDOR_HOMES = {
    "zmq": ("engine/transport/zmq*.py",),
    "msgspec": ("engine/wire/*.py",),
    "prometheus_client": ("metrics/*.py",),
    "pydantic": ("configs/*.py",),
    "vllm": ("workers/vllm*.py",),
    "torch": ("learner/**/*.py", "workers/vllm*.py"),
    "deepspeed": ("learner/backends/deepspeed*.py",),
    "transformers": ("learner/**/*.py", "workers/vllm*.py"),
}
"""One vendor, one home: the files that may import it."""


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


@pytest.mark.parametrize("package", PACKAGES)
def test_each_top_level_package_resolves_inside_the_repository(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / package / "__init__.py"


def test_no_source_file_is_longer_than_the_cap():
    lengths = {_relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _sources()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_test_or_benchmark_file_is_longer_than_the_cap():
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    lengths = {_relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_TEST_FILE_LINES} == {}


def test_no_function_is_longer_than_the_cap():
    too_long = [
        f"{_relative(path)}:{function.lineno} {function.name}: {function.end_lineno - function.lineno + 1} lines"
        for path in _sources()
        for function in _functions(path)
        if function.end_lineno - function.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def test_no_function_has_more_parameters_than_the_cap():
    too_many = [
        f"{_relative(path)}:{function.lineno} {function.name}: {_num_parameters(function)} parameters"
        for path in _sources()
        for function in _functions(path)
        if _num_parameters(function) > MAX_PARAMETERS
    ]
    assert too_many == []


@pytest.mark.parametrize("vendor", VENDOR_HOMES)
def test_a_vendor_is_imported_only_in_its_home(vendor):
    homes = {path for pattern in VENDOR_HOMES[vendor] for path in ROOT.glob(pattern)}
    strangers = [
        _relative(path)
        for path in _sources()
        if path not in homes
        and any(name.split(".")[0] == vendor for name in _imported_names(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    assert strangers == []


def test_every_module_says_what_it_is_for():
    silent = [
        _relative(path)
        for path in _sources()
        if path.stat().st_size and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "manager", "common", "misc"}
    assert [_relative(path) for path in _sources() if drawers & {path.stem, path.parent.name}] == []
