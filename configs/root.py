"""The whole configuration of a run: one section a component."""

from typing import Self

from pydantic import Field, model_validator

from configs.base import Section
from configs.inputs import Data, Evaluation, Model, Verifier
from configs.processes import Cores, Server, Simulated, Worker
from configs.sampling import Sampling, Staleness, Strategy
from configs.training import Checkpoint, Learner, Loss, Optimizer, Run, Weights


class Config(Section):
    """Everything `python -m engine.serve --config X` reads."""

    run: Run = Field(default_factory=lambda: Run(max_steps=1))
    """Name, seed, length."""
    model: Model = Field(default_factory=Model)
    """The language model."""
    data: Data = Field(default_factory=Data)
    """Training and held-out prompts."""
    strategy: Strategy = Field(default_factory=Strategy)
    """Exit rule and kept samples."""
    staleness: Staleness = Field(default_factory=Staleness)
    """The hard bound η."""
    sampling: Sampling = Field(default_factory=Sampling)
    """Length and temperature."""
    verifier: Verifier = Field(default_factory=Verifier)
    """Verdicts."""
    evaluation: Evaluation = Field(default_factory=Evaluation)
    """Held-out test."""
    worker: Worker = Field(default_factory=Worker)
    """Generation workers."""
    simulated: Simulated = Field(default_factory=Simulated)
    """Simulated worker and learner."""
    learner: Learner = Field(default_factory=Learner)
    """Optimizer steps."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """AdamW."""
    loss: Loss = Field(default_factory=Loss)
    """PPO-clip."""
    weights: Weights = Field(default_factory=Weights)
    """Weight updates."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Checkpoints."""
    cores: Cores = Field(default_factory=Cores)
    """Pinning."""
    server: Server = Field(default_factory=Server)
    """Addresses and terminal view."""

    @model_validator(mode="after")
    def _context_holds_a_response(self) -> Self:
        if self.sampling.max_tokens >= self.model.max_context_tokens:
            raise ValueError(
                f"sampling.max_tokens must be < model.max_context_tokens = {self.model.max_context_tokens}, "
                f"got {self.sampling.max_tokens}: no prompt would fit"
            )
        return self
