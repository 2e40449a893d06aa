"""Who runs where: generation workers, learner, server addresses, cores."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.base import Section


class Simulated(Section):
    """The simulated worker and learner: seeded latencies and pass rates (worker.kind = "simulated")."""

    pass_rate: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] = Field(default=(), strict=False)
    """Pass rates drawn from, uniformly by prompt; empty = the four published tiers, uniform within each."""
    tokens_mean: float = Field(default=64.0, gt=0.0)
    """Mean response length of a right answer."""
    tokens_sigma: float = Field(default=0.8, ge=0.0, le=5.0)
    """Sigma of the lognormal length law."""
    length_ratio_wrong: float = Field(default=1.0, gt=0.0)
    """Mean length of wrong answers over that of right ones."""
    tokens_per_s: float = Field(default=2000.0, gt=0.0)
    """Tokens a second of one slot."""
    failure_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of requests that fail instead of answering."""
    step_s: float = Field(default=0.2, ge=0.0)
    """Duration of a simulated optimizer step."""


class Worker(Section):
    """Generation workers."""

    kind: Literal["vllm", "simulated"] = "vllm"
    """The implementation behind the wire."""
    count: int = Field(default=1, ge=1, le=1024)
    """Workers that the engine starts on this machine (0 slots are lent by workers started elsewhere)."""
    slots: int = Field(default=32, ge=1)
    """Requests that one worker runs at once."""
    kv_cache_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """KV cache of one worker."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    """Weights and activations of the generation engine."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of one worker before the run ends with an error."""
    boot_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest start of a worker."""
    heartbeat_deadline_s: float = Field(default=60.0, ge=4.0)
    """A worker silent for longer is fenced and restarted. Workers and learner say something every 2 and 3 s."""
    max_sample_failures: int = Field(default=3, ge=1)
    """Failures of one sample before its prompt is quarantined."""


class Cores(Section):
    """CPU pinning on one machine."""

    pin: bool = True
    """Give generation and learning disjoint cores (no effect with one core: they take turns)."""
    generation: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Cores of the generation workers; empty = the first half."""
    learning: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    """Cores of the learner; empty = the other half."""
    lend: bool = True
    """With two workers or more, the last one runs on the learner's cores at low priority: it uses the time in which the
    learner waits for groups."""

    @model_validator(mode="after")
    def _sides_are_disjoint(self) -> Self:
        for name, cores in (("generation", self.generation), ("learning", self.learning)):
            if len(set(cores)) < len(cores):
                raise ValueError(f"cores.{name} must name each core once, got {list(cores)}")
        shared = sorted(set(self.generation) & set(self.learning))
        if shared and len({*self.generation, *self.learning}) > 1:
            raise ValueError(f"cores.learning must share no core with cores.generation, got {shared} in both")
        return self


class Server(Section):
    """Addresses of the engine. Loopback unless changed."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Interface that every port binds to."""
    http_port: int = Field(default=8890, ge=0, le=65535)
    """/healthz and /metrics; 0 = any free port."""
    wire_port: int = Field(default=0, ge=0, le=65535)
    """Where workers and learner connect; 0 = any free port."""
    live: Literal["auto", "rich", "plain", "none"] = "auto"
    """Terminal view; auto = rich on a terminal, plain lines elsewhere."""
    drain_deadline_s: float = Field(default=60.0, gt=0.0)
    """Longest graceful shutdown before processes are killed."""

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.wire_port and self.wire_port == self.http_port:
            raise ValueError(f"server.wire_port must not be server.http_port, got {self.wire_port} for both")
        return self
