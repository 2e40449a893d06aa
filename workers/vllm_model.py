"""Whether `model.path` can be used, looked at before anything heavy is imported."""

import json
from pathlib import Path

from engine.core.errors import RunError

CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check_model(path: str) -> None:
    """Refuse a folder that holds no causal language model. A hub name is left to the hub.

    Raises:
        RunError: the text says what is wrong with `model.path`.
    """
    folder = Path(path)
    if not folder.exists():
        # "owner/name" may be a hub name, unless its first part is a folder here.
        if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not folder.parent.is_dir():
            return
        raise RunError(f"model.path {path} does not exist; `make prepare` makes the quickstart's model")
    try:
        table = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise RunError(f"model.path {path} must be a folder with a readable config.json: {exc}") from exc
    architectures = table.get("architectures") or []
    if not any(name.endswith(CAUSAL_ENDINGS) for name in architectures):
        found = ", ".join(architectures) or "no architecture"
        raise RunError(f"model.path {path} must hold a causal language model, got {found}")
    if not any(folder.glob("*.safetensors")):
        raise RunError(f"model.path {path} must hold safetensors files, found none")
