"""Which model folders can be used."""

import json
from pathlib import Path

import pytest

from configs.model_folder import ModelError, check_model


def model_folder(folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_causal_model_is_taken(tmp_path: Path) -> None:
    check_model(str(model_folder(tmp_path)))


def test_a_hub_name_is_left_to_the_hub() -> None:
    check_model("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_another_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must hold a causal language model, got BertModel"):
        check_model(str(model_folder(tmp_path, "BertModel")))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"readable config\.json"):
        check_model(str(tmp_path))


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors files, found none"):
        check_model(str(tmp_path))
