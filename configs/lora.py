"""Low-rank adapters instead of all weights."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from configs.base import Section

ALL_LINEAR = "all-linear"


class Lora(Section):
    """LoRA (Hu et al., arXiv 2106.09685) through peft: W + alpha / rank · B·A, where only A and B train.

    There is no dropout: ratios compare with logprobs that were drawn without it.
    """

    rank: int = Field(default=0, ge=0)
    """r: rows of A and columns of B; 0 = off, all weights train."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The product B·A is scaled by alpha / rank."""
    target_modules: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=lambda: [ALL_LINEAR], min_length=1
    )
    """Ends of the names of the layers that get adapters, e.g. `q_proj`; `all-linear` alone = every linear layer but the
    head."""

    @model_validator(mode="after")
    def _all_stands_alone(self) -> Self:
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            raise ValueError(
                f"lora.target_modules must be [{ALL_LINEAR!r}] or names of layers, got {self.target_modules}"
            )
        return self
