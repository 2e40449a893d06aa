"""Whether `model.path` can be used, looked at before anything heavy is imported and before the engine is bothered."""

import json
from pathlib import Path
from typing import cast

CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class ModelError(ValueError):
    """The model cannot be used; the text says why and what would help."""


def check_model(path: str, key: str = "model.path") -> None:
    """Refuse a folder that holds no causal language model; a hub name (owner/name) is left to the hub.

    Args:
        path: A folder, or a hub name.
        key: The configuration's key that has it, for the message.

    Raises:
        ModelError: no such folder, no readable configuration, no weights, or another kind of model.
    """
    folder = Path(path)
    if is_hub_name(path):
        return
    if not folder.is_dir():
        raise ModelError(f"{key} {path} does not exist; learner.prepare makes the quickstart's model")
    try:
        table = cast("dict[str, object]", json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        raise ModelError(f"{key} {path} must be a folder with a readable config.json: {exc}") from exc
    architectures = cast("list[str]", table.get("architectures") or [])
    if not any(name.endswith(CAUSAL_ENDINGS) for name in architectures):
        found = ", ".join(architectures) or "no architecture"
        raise ModelError(f"{key} {path} must hold a causal language model, got {found}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{key} {path} must hold safetensors files, found none")


def is_hub_name(path: str) -> bool:
    """Whether `path` names a model of the hub: owner/name, and neither is a folder here."""
    folder = Path(path)
    is_plain = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return is_plain and not folder.exists() and not folder.parent.is_dir()
