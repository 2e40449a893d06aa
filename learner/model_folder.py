"""Whether `model.path` can be trained, looked at before torch is imported and before the engine is bothered."""

import json
from pathlib import Path


class ModelError(ValueError):
    """The model cannot be trained; the text says why and what would help."""


def check_model(path: str) -> None:
    """Refuse a folder that holds no causal language model; a hub name (owner/name) is left to the hub.

    Raises:
        ModelError: no such folder, no readable configuration, or another kind of model.
    """
    folder = Path(path)
    if is_hub_name(path):
        return
    if not folder.is_dir():
        raise ModelError(f"model.path {path} does not exist; `make prepare` makes the quickstart's model")
    try:
        table = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ModelError(f"model.path {path} must be a folder with a readable config.json: {exc}") from exc
    architectures = table.get("architectures") or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        found = ", ".join(architectures) or "no architecture"
        raise ModelError(f"model.path {path} must hold a causal language model, got {found}")


def is_hub_name(path: str) -> bool:
    """Whether `path` names a model of the hub: owner/name, and neither is a folder here."""
    folder = Path(path)
    is_plain = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return is_plain and not folder.exists() and not folder.parent.is_dir()
