"""The one base class of every configuration model: unknown keys are errors, values are frozen."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the TOML file. Field names carry their unit (`_s`, `_tokens`, `_bytes`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
