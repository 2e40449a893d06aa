"""The whole configuration of a run: one section a component."""

from typing import Self

from pydantic import Field, model_validator

from configs.base import Section
from configs.inputs import Data, Evaluation, Model, Verifier
from configs.lora import Lora
from configs.processes import Cores, Server, Simulated, Worker
from configs.sampling import Sampling, Staleness
from configs.selection import Selector
from configs.simulation import Simulation
from configs.strategy import ALLOCATING, Advantage, Allocation, Futility, Giveup, History, Pilot, Stage, Strategy
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
    stages: list[Stage] = Field(default_factory=list[Stage])
    """Later strategies, in order."""
    advantage: Advantage = Field(default_factory=Advantage)
    """Baseline and weights."""
    selector: Selector = Field(default_factory=Selector)
    """Which prompt is visited next."""
    history: History = Field(default_factory=History)
    """Memory of prompts."""
    allocation: Allocation = Field(default_factory=Allocation)
    """Budgets by what is known."""
    giveup: Giveup = Field(default_factory=Giveup)
    """Never give up."""
    pilot: Pilot = Field(default_factory=Pilot)
    """Pilot, then commit."""
    futility: Futility = Field(default_factory=Futility)
    """Arms that are not worth it."""
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
    sim: Simulation = Field(default_factory=Simulation)
    """Runs under a virtual clock (engine.simulate)."""
    learner: Learner = Field(default_factory=Learner)
    """Optimizer steps."""
    optimizer: Optimizer = Field(default_factory=Optimizer)
    """AdamW."""
    lora: Lora = Field(default_factory=Lora)
    """Low-rank adapters instead of all weights."""
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
    def _adapters_can_be_trained(self) -> Self:
        if self.lora.rank and self.learner.kind != "torch":
            raise ValueError(f"lora.rank must be 0 with learner.kind = {self.learner.kind}, got {self.lora.rank}")
        return self

    @model_validator(mode="after")
    def _stages_are_in_order(self) -> Self:
        firsts = [stage.from_step for stage in self.stages]
        if firsts != sorted(set(firsts)):
            raise ValueError(f"stages must have rising from_step, got {firsts}")
        if self.run.max_steps and firsts and firsts[-1] >= self.run.max_steps:
            raise ValueError(f"stages must begin before run.max_steps = {self.run.max_steps}, got {firsts[-1]}")
        return self

    @model_validator(mode="after")
    def _budgets_can_be_set(self) -> Self:
        name, spend = self.strategy.name, self.allocation
        if name not in ALLOCATING:
            return self
        if spend.samples_per_prompt > self.strategy.n_max:
            raise ValueError(
                f"allocation.samples_per_prompt must be <= strategy.n_max = {self.strategy.n_max} for {name},"
                f" got {spend.samples_per_prompt:g}"
            )
        if name == "vip" and spend.n_min < 2:
            raise ValueError(f"allocation.n_min must be >= 2 for vip (a variance needs two samples), got {spend.n_min}")
        if name == "gvm" and self.history.version_decay >= 1.0:
            raise ValueError(
                "history.version_decay must be < 1 for gvm, got 1: a prompt whose first samples were all wrong would"
                " never be visited again"
            )
        return self

    @model_validator(mode="after")
    def _context_holds_a_response(self) -> Self:
        if self.sampling.max_tokens >= self.model.max_context_tokens:
            raise ValueError(
                f"sampling.max_tokens must be < model.max_context_tokens = {self.model.max_context_tokens}, "
                f"got {self.sampling.max_tokens}: no prompt would fit"
            )
        return self
