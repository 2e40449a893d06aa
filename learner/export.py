"""Turn a checkpoint into a plain HF folder: `python -m learner.export CHECKPOINT OUT [--dtype bfloat16|float32]`.

The weights are put together from the ranks' float32 master shards, of any ZeRO stage or of the torch backend, and
rounded once to the dtype that is wanted; bfloat16 gives exactly the weights that were published. A run that trained
adapters has no such masters of the whole model: its merged weights go out as they are, in bfloat16.

Invariants: every file of the checkpoint is read and compared first; OUT appears whole or not at all.

Exit codes: 0 written; 2 the checkpoint cannot be used, or OUT exists or cannot be written.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from configs.model_folder import ModelError, check_model
from engine.core.errors import DataError, first_line
from learner.checkpoint import read_record, sync_folder
from learner.lora import ADAPTER_FOLDER
from learner.shards import read_masters

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and export; the exit code."""
    parser = argparse.ArgumentParser(prog="learner.export", description="Write a checkpoint as a plain HF folder.")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="e.g. runs/NAME/checkpoints/step-000012")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights that are written")
    options = parser.parse_args(arguments)
    try:
        export(options.checkpoint, options.out, DTYPES[options.dtype])
    except DataError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write(f"wrote {options.out}\n")
    return 0


def export(checkpoint: Path, out: Path, dtype: torch.dtype) -> None:
    """Write weights, configuration, generation configuration and tokenizer of `checkpoint` to `out`.

    Raises:
        DataError: the checkpoint is not whole or cannot be used, or `out` exists or cannot be written.
    """
    if out.exists():
        raise DataError(f"OUT must not exist yet, {out} does")
    if not checkpoint.is_dir():
        raise DataError(f"CHECKPOINT must be a folder such as runs/NAME/checkpoints/step-000012, {checkpoint} is none")
    read_record(checkpoint)
    transformers_logging.disable_progress_bar()
    try:
        check_model(str(checkpoint), "CHECKPOINT")
        model, state = _merged(checkpoint, dtype) if _has_adapters(checkpoint) else _from_masters(checkpoint, dtype)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except ModelError as exc:
        raise DataError(str(exc)) from exc
    except (OSError, ValueError) as exc:
        text = f"checkpoint {checkpoint} must hold a causal language model and its tokenizer: {first_line(exc)}"
        raise DataError(text) from exc
    _write(out, checkpoint, model, state, tokenizer)


def _has_adapters(checkpoint: Path) -> bool:
    return (checkpoint / ADAPTER_FOLDER).is_dir()


def _from_masters(checkpoint: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model without weights, and its weights."""
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    with torch.device("meta"):
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=dtype))
    masters = read_masters(checkpoint, {name: parameter.shape for name, parameter in model.named_parameters()})
    return model, {name: master.to(dtype) for name, master in masters.items()}


def _merged(checkpoint: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, None]:
    """The model with its weights."""
    if dtype != torch.bfloat16:
        raise DataError(
            f"--dtype must be bfloat16 for checkpoint {checkpoint}: its run trained adapters ({ADAPTER_FOLDER}/), so "
            "the whole weights are there in bfloat16 only"
        )
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, local_files_only=True), None


def _write(
    out: Path,
    checkpoint: Path,
    model: PreTrainedModel,
    state: dict[str, torch.Tensor] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Fill a folder beside `out`, then rename it; `state` = the weights that `model` does not have itself."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary, state_dict=state)
        for path in checkpoint.glob("generation_config.json"):
            shutil.copy(path, temporary)
        tokenizer.save_pretrained(temporary)
        sync_folder(temporary)
        temporary.rename(out)
    except Exception as exc:  # safetensors and tokenizers have types of their own; all mean that it is not written
        raise DataError(f"OUT {out} could not be written: {first_line(exc)}") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
