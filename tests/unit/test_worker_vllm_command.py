"""The vLLM worker's command line, as far as it goes without vLLM."""

from pathlib import Path

import pytest

from workers.vllm import main


def run_main(tmp_path: Path, *arguments: str) -> int:
    config = tmp_path / "config.toml"
    config.write_text("[run]\nmax_steps = 1\n")
    return main(["--connect", "tcp://127.0.0.1:1", "--config", str(config), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "model.path=/nowhere/model"), "model.path /nowhere/model does not exist"),
        (("--set", "model.pth=x"), "did you mean 'path'"),
        (("--cores", "zero"), "cores must look like 0,1, got 'zero'"),
    ],
)
def test_what_cannot_be_used_ends_with_2_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: tuple[str, ...], message: str
) -> None:
    assert run_main(tmp_path, *arguments) == 2
    assert message in caplog.text
