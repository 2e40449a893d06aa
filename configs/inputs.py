"""What the run reads: model folder, data sets, verifier."""

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Section


class Model(Section):
    """The language model that is trained."""

    path: str = Field(default="models/smollm2-135m-instruct", min_length=1)
    """A folder in HF format, or a model name where the hub is reachable."""
    max_context_tokens: int = Field(default=512, ge=16)
    """Prompt plus response, at most; longer prompts are skipped and counted."""
    chat_template: bool = True
    """Wrap each prompt as a user message in the model's chat template."""


class Data(Section):
    """Training and held-out prompts."""

    train: str = Field(default="datasets/arithmetic/train.jsonl", min_length=1)
    """`path.jsonl`, `path.parquet`, an HF data set name (`name` or `name:split`), or `simulated:ROWS`."""
    test: str = "datasets/arithmetic/test.jsonl"
    """Held-out prompts, same forms; empty = no evaluation."""
    prompt_column: str = Field(default="problem", min_length=1)
    """Column of the prompt text."""
    answer_column: str = Field(default="answer", min_length=1)
    """Column of the reference answer."""
    id_column: str = "id"
    """Column of the stable id; a row without one gets a hash of its prompt and answer."""
    level_column: str = "level"
    """Column of the difficulty label; rows without one are `unlabelled`."""
    levels: tuple[str, ...] = Field(default=(), strict=False)
    """Keep only these levels of the training data; empty = all."""
    max_epochs: int = Field(default=1000, ge=1)
    """Passes over the training data before the queue ends."""

    @model_validator(mode="after")
    def _answers_are_not_prompts(self) -> Self:
        if self.answer_column == self.prompt_column:
            raise ValueError(f"data.answer_column must not be data.prompt_column, got {self.answer_column!r} for both")
        return self


class Verifier(Section):
    """Who decides whether a response is right."""

    name: Literal["numeric", "math", "exact"] = "numeric"
    """`numeric`: last number; `math`: math-verify; `exact`: the stripped text equals the answer."""
    processes: int = Field(default=1, ge=1, le=256)
    """Killable verifier processes."""
    deadline_s: float = Field(default=5.0, gt=0.0)
    """Longest work on one verdict, from the start of the work; then the process is killed."""
    max_attempts: int = Field(default=2, ge=1)
    """Verdicts tried for a sample (time-out, crash) before it is failed."""


class Evaluation(Section):
    """The held-out test, before and after training."""

    samples: int = Field(default=4, ge=1)
    """Samples a prompt at temperature 1.0 (Ave@k)."""
    greedy: bool = True
    """Also measure greedy accuracy."""
    max_prompts: int = Field(default=240, ge=1)
    """Held-out prompts used, at most (the first ones of the file)."""
