"""What the learner does with groups."""

from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Section


class Learner(Section):
    """Optimizer steps. Defaults are the paper's (arXiv 2510.04996) where it gives one."""

    kind: Literal["torch", "simulated"] = "torch"
    """`torch` trains; `simulated` only waits (load tests)."""
    groups_per_step: int = Field(default=16, ge=1)
    """B: groups per optimizer step."""
    micro_batch_tokens: int = Field(default=2048, ge=16)
    """Packed tokens of one forward and backward pass."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once (1,024 rows of 49,152 bf16 logits: 100 MB). A pass with no more response tokens
    computes them once, otherwise twice."""
    share_prefixes: bool = True
    """Compute a group's prompt once for all its responses, and once what all prompts of a pass begin with."""
    idle_deadline_s: float = Field(default=600.0, gt=0.0)
    """Longest wait for a group, a publication or an acknowledgement before the learner exits with an error."""
    overlap_updates: bool = True
    """Compute the next step's gradient while workers load the last step's weights; false where both share cores."""
    threads: int = Field(default=0, ge=0)
    """Threads of the learner's linear algebra; 0 = one a core it was given."""


class Optimizer(Section):
    """AdamW over an fp32 master copy of bf16 weights."""

    lr: float = Field(default=1e-6, gt=0.0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Global gradient norm is clipped here."""


class Loss(Section):
    """PPO-clip, global token-mean."""

    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """ε_low: the ratio is clipped at 1 - ε_low."""
    clip_high: float = Field(default=0.28, gt=0.0)
    """ε_high: the ratio is clipped at 1 + ε_high."""
    dual_clip: float = Field(default=10.0, gt=1.0)
    """c: for negative advantages the objective is bounded below by c·A."""
    entropy_weight: float = Field(default=1e-4, ge=0.0)
    """Weight of the entropy bonus."""


class Weights(Section):
    """How new weights reach the workers, and when an update counts as right."""

    buffered: bool = True
    """On CPUs: take new weights into a second set beside generation, so that it pauses only for the exchange. Costs the
    weights' memory once more. False, and on GPUs: load in place, in the pause."""
    stage_deadline_s: float = Field(default=60.0, gt=0.0)
    """Longest staging on a worker."""
    apply_deadline_s: float = Field(default=60.0, gt=0.0)
    """Longest pause, load and canary on a worker."""
    canary_prompts: int = Field(default=4, ge=1, le=64)
    """Fixed sequences whose logprobs are compared after every update."""
    canary_noise_factor: float = Field(default=4.0, ge=1.0)
    """Threshold = this factor x the lag-0 noise measured at start (never under canary_floor_nats)."""
    canary_floor_nats: float = Field(default=0.1, gt=0.0)
    """Smallest threshold of the largest logprob difference, nats."""


class Checkpoint(Section):
    """Checkpoints in HF format under runs/NAME/checkpoints."""

    every_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0 = only at the end."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""


class Run(Section):
    """Name, place, seed and length of the run."""

    name: str = Field(default="quickstart", pattern=r"^[A-Za-z0-9._-]+$")
    """Folder under runs/."""
    folder: str = "runs"
    """Where run folders live."""
    seed: int = Field(default=0, ge=0)
    """Seeds shuffles, samples and selections."""
    max_steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0 = no limit of steps."""
    max_train_s: float = Field(default=0.0, ge=0.0)
    """Seconds of training; 0 = no limit of time."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not self.max_steps and not self.max_train_s:
            raise ValueError("run.max_steps or run.max_train_s must be above 0, got 0 for both")
        return self
