"""The one base class of every configuration model: unknown keys are errors, values are frozen.

Types are those of TOML: no text or boolean where a number belongs; an integer is a float too. Numbers are finite unless
a field says what infinity means there.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the TOML file. Field names carry their unit (`_s`, `_tokens`, `_bytes`)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )
