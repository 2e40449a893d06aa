"""The vLLM worker's command line, as far as it goes without vLLM."""

import json
from pathlib import Path

import pytest

from engine.core.errors import RunError
from workers.vllm import main
from workers.vllm_model import check_model


def model_folder(folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_causal_model_is_taken(tmp_path: Path) -> None:
    check_model(str(model_folder(tmp_path)))


def test_a_hub_name_is_left_to_the_hub() -> None:
    check_model("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="must hold a causal language model, got BertModel"):
        check_model(str(model_folder(tmp_path, "BertModel")))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"readable config\.json"):
        check_model(str(tmp_path))


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(RunError, match="safetensors files, found none"):
        check_model(str(tmp_path))


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
