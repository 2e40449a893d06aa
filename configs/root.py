"""The whole configuration of a run: one section a component."""

from typing import Self

from pydantic import Field, model_validator

from configs.base import Section
from configs.inputs import Data, Evaluation, Model, Verifier
from configs.lora import Lora
from configs.loss import Loss
from configs.meaning import meaningless
from configs.processes import Cores, Server, Simulated, Worker
from configs.sampling import Reward, Sampling, Staleness
from configs.schedule import LEAST_STEPS, Stage, seed_schedule
from configs.selection import Selector
from configs.simulation import Simulation
from configs.strategy import ALLOCATING, Advantage, Allocation, Futility, Giveup, History, Pilot, Strategy
from configs.training import Checkpoint, Learner, Optimizer, Run, Weights


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
    stages: list[Stage] = Field(default_factory=list[Stage], strict=False)
    """Strategies and selectors of later parts of the run, in order."""
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
    reward: Reward = Field(default_factory=Reward)
    """What is added to the verdict."""
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
    """Objective, clips, aggregation."""
    weights: Weights = Field(default_factory=Weights)
    """Weight updates."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Checkpoints."""
    cores: Cores = Field(default_factory=Cores)
    """Pinning."""
    server: Server = Field(default_factory=Server)
    """Addresses and terminal view."""

    @property
    def schedule(self) -> list[Stage]:
        """[[stages]], or the seeds' schedule where `strategy.name` is `staged` and none are written."""
        if self.strategy.name == "staged" and not self.stages:
            return seed_schedule(self.run.max_steps)
        return self.stages

    @property
    def strategies(self) -> list[Strategy]:
        """Strategies of the run in the order in which they take force; the first one is that of version 0."""
        staged = [stage.strategy for stage in self.schedule if stage.strategy is not None]
        return staged if self.strategy.name == "staged" else [self.strategy, *staged]

    @model_validator(mode="after")
    def _keys_have_a_meaning(self) -> Self:
        lines = list(meaningless(self))
        for number, stage in enumerate(self.stages):
            if stage.selector is not None:
                lines += [f"stages.{number}.{line}" for line in meaningless(stage, "selector")]
        if lines:
            raise ValueError("\n".join(lines))
        return self

    @model_validator(mode="after")
    def _stages_cover_the_run(self) -> Self:
        firsts, max_steps = [stage.from_step for stage in self.stages], self.run.max_steps
        is_staged = self.strategy.name == "staged"
        if is_staged and not firsts and max_steps < LEAST_STEPS:
            raise ValueError(
                f"run.max_steps must be >= {LEAST_STEPS} for strategy.name = staged without [[stages]], got"
                f" {max_steps}: its schedule is made of fifths of the run"
            )
        if is_staged and firsts and firsts[0]:
            raise ValueError(
                f"stages.0.from_step must be 0 for strategy.name = staged, got {firsts[0]}: nothing covers the start"
            )
        if is_staged and firsts and self.stages[0].strategy is None:
            raise ValueError("stages.0.strategy must be set for strategy.name = staged: nothing else does")
        if not is_staged and firsts and not firsts[0]:
            raise ValueError("stages.0.from_step must be >= 1, got 0: [strategy] covers the start, or is `staged`")
        if firsts != sorted(set(firsts)):
            raise ValueError(f"stages must have rising from_step, got {firsts}")
        if max_steps and firsts and firsts[-1] >= max_steps:
            raise ValueError(f"stages must begin before run.max_steps = {max_steps}, got {firsts[-1]}")
        return self

    @model_validator(mode="after")
    def _budgets_can_be_set(self) -> Self:
        for strategy in self.strategies:
            if strategy.name in ALLOCATING:
                self._check_budgets(strategy)
        return self

    def _check_budgets(self, strategy: Strategy) -> None:
        name, spend = strategy.name, self.allocation
        if spend.samples_per_prompt > strategy.n_max:
            raise ValueError(
                f"allocation.samples_per_prompt must be <= strategy.n_max = {strategy.n_max} for {name},"
                f" got {spend.samples_per_prompt:g}"
            )
        if name == "vip" and spend.n_min < 2:
            raise ValueError(f"allocation.n_min must be >= 2 for vip (a variance needs two samples), got {spend.n_min}")
        if name == "gvm" and self.history.version_decay >= 1.0:
            raise ValueError(
                "history.version_decay must be < 1 for gvm, got 1: a prompt whose first samples were all wrong would"
                " never be visited again"
            )

    @model_validator(mode="after")
    def _estimate_reads_labels_only(self) -> Self:
        if self.strategy.max_tokens_per_visit and (self.advantage.name, self.advantage.baseline) == (
            "custom",
            "unbiased",
        ):
            raise ValueError(
                "strategy.max_tokens_per_visit must be 0 with advantage.baseline = unbiased, got "
                f"{self.strategy.max_tokens_per_visit}: that estimate holds only where labels alone end a visit"
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

    @model_validator(mode="after")
    def _micro_batch_holds_a_context(self) -> Self:
        if self.learner.kind != "simulated" and self.model.max_context_tokens > self.learner.micro_batch_tokens:
            raise ValueError(
                f"learner.micro_batch_tokens must be >= model.max_context_tokens = {self.model.max_context_tokens}, "
                f"got {self.learner.micro_batch_tokens}: a prompt with its response would not fit"
            )
        return self

    @model_validator(mode="after")
    def _penalty_fits_a_response(self) -> Self:
        if self.reward.overlong_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"reward.overlong_tokens must be <= sampling.max_tokens = {self.sampling.max_tokens}, "
                f"got {self.reward.overlong_tokens}"
            )
        return self
