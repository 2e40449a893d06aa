"""What people write: one typed model a component, loading, overrides and the presets (*.toml).

Invariants: importable without torch or vllm; an unknown key is an error; a loaded config is frozen.
"""

from configs.base import Section
from configs.load import load_config
from configs.root import Config

__all__ = ["Config", "Section", "load_config"]
