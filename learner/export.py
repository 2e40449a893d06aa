"""Turn a checkpoint into a plain HF folder: `python -m learner.export CHECKPOINT OUT [--dtype bfloat16|float32]`.

The weights are put together from the ranks' float32 master shards, of any ZeRO stage or of the torch backend, and
rounded once to the dtype that is wanted; bfloat16 gives exactly the weights that were published.

Exit codes: 0 written; 2 the checkpoint cannot be used, or OUT exists.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.core.errors import DataError
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
    return 0


def export(checkpoint: Path, out: Path, dtype: torch.dtype) -> None:
    """Write weights, configuration, generation configuration and tokenizer of `checkpoint` to `out`.

    Raises:
        DataError: the checkpoint cannot be used, or `out` exists.
    """
    if out.exists():
        raise DataError(f"OUT must not exist yet, {out} does")
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise DataError(f"checkpoint {checkpoint} must hold a model's configuration and tokenizer: {exc}") from exc
    with torch.device("meta"):
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, dtype=dtype))
    masters = read_masters(checkpoint, {name: parameter.shape for name, parameter in model.named_parameters()})
    state = {name: master.to(dtype) for name, master in masters.items()}
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary, state_dict=state)
    for path in checkpoint.glob("generation_config.json"):
        shutil.copy(path, temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(out)


if __name__ == "__main__":
    sys.exit(main())
