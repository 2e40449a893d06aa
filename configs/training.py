"""What the learner does with groups."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from configs.base import Section


class Learner(Section):
    """Optimizer steps. Defaults are the paper's (arXiv 2510.04996) where it gives one."""

    kind: Literal["torch", "simulated"] = "torch"
    """`torch` trains; `simulated` only waits (load tests)."""
    backend: Literal["torch", "deepspeed"] = "torch"
    """`torch`: one rank. `deepspeed`: ZeRO over one or many (needs the package's extra of that name)."""
    ranks: int = Field(default=1, ge=1, le=4096)
    """Processes that share the learner's work and, by ZeRO, its memory. The engine starts them on this machine; any
    other launcher must start as many."""
    zero_stage: int = Field(default=2, ge=1, le=3)
    """What `deepspeed` splits over ranks: 1 optimizer, 2 and gradients, 3 and weights."""
    rank_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest collective operation and silence of a rank, and longest wait for its reply once rank 0 has finished its
    own part; then the learner exits with an error."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy is trained; `auto` = CUDA where torch finds it."""
    groups_per_step: int = Field(default=16, ge=1)
    """B: groups per policy version."""
    max_tokens_per_step: int = Field(default=0, ge=0)
    """Response tokens generated for one step at which it is taken with the groups it has, at least one with samples;
    the other places stay vacant. 0 = no limit."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per policy version. Above 1 the B groups are gathered, shuffled and split; with 1 the gradient is
    computed while they come in. The paper takes 4 (of 128 prompts each)."""
    micro_batch_tokens: int = Field(default=2048, ge=16)
    """Packed tokens of one forward and backward pass; a prompt with one response must fit."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at once (1,024 rows of 49,152 bf16 logits: 100 MB). A pass with no more response tokens
    computes them once, otherwise twice."""
    share_prefixes: bool = True
    """Compute a group's prompt once for all its responses, and once what all prompts of a pass begin with."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer and compute the layer again in the backward pass. SmolLM2-135M, 1,104 packed
    tokens: peak 0.6 instead of 2.0 GB above weights and optimizer, for 18 % more CPU time."""
    compile: bool = False
    """Compile the layers with torch.compile. On CPUs it needs a C++ compiler and a minute, and doesn't pay: 5.6 against
    5.7 ms of CPU time a packed token (SmolLM2-135M)."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """So many optimizer steps in a row without a finite gradient end the run."""
    max_first_mismatch_nats: float = Field(default=1.0, gt=0.0)
    """Largest mean |behaviour - learner logprob| over the first step's tokens of the learner's own version, nats. More
    means that the samples were drawn from another model, or with another tokenizer."""
    idle_deadline_s: float = Field(default=600.0, gt=0.0)
    """Longest wait for a group, a publication or an acknowledgement before the learner exits with an error."""
    overlap_updates: bool = True
    """Compute the next step's gradient while workers load the last step's weights; false where both share cores."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of a rank's linear algebra; 0 = one a core, the cores shared out over the ranks of a machine."""

    @model_validator(mode="after")
    def _ranks_have_a_backend(self) -> Self:
        if self.ranks > 1 and (self.kind != "torch" or self.backend != "deepspeed"):
            raise ValueError(
                f'learner.ranks must be 1 unless learner.backend = "deepspeed" (and learner.kind = "torch"), '
                f"got {self.ranks}"
            )
        return self

    @model_validator(mode="after")
    def _mini_batches_are_filled(self) -> Self:
        if self.mini_batches > self.groups_per_step:
            raise ValueError(
                f"learner.mini_batches must be <= learner.groups_per_step = {self.groups_per_step}, "
                f"got {self.mini_batches}"
            )
        return self


class Optimizer(Section):
    """AdamW over an fp32 master copy of bf16 weights."""

    lr: float = Field(default=1e-6, gt=0.0, le=1.0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up, at most run.max_steps where that is set."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0, allow_inf_nan=True)
    """Global gradient norm is clipped here; inf = never."""

    @model_validator(mode="after")
    def _decay_keeps_the_sign(self) -> Self:
        if self.weight_decay * self.lr >= 1.0:
            raise ValueError(
                f"optimizer.weight_decay must be < 1 / optimizer.lr = {1.0 / self.lr:g}, got {self.weight_decay:g}:"
                " a step would turn weights around"
            )
        return self


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
    """Checkpoints in HF format under runs/NAME/checkpoints, with what a resume needs beside it."""

    every_steps: int = Field(default=0, ge=0)
    """A checkpoint every so many steps; 0 = only at the end."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_every: int = Field(default=0, ge=0)
    """Those whose version is a multiple of it are kept for good; 0 = none. A multiple of every_steps."""

    @model_validator(mode="after")
    def _those_for_good_are_made(self) -> Self:
        if self.keep_every and (not self.every_steps or self.keep_every % self.every_steps):
            raise ValueError(
                f"checkpoint.keep_every must be a multiple of checkpoint.every_steps = {self.every_steps}, "
                f"got {self.keep_every}"
            )
        return self


class Run(Section):
    """Name, place, seed and length of the run."""

    name: str = "quickstart"
    """Folder under run.folder: letters, digits, dots, underscores and hyphens."""
    folder: str = Field(default="runs", min_length=1)
    """Where run folders live."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seeds shuffles, samples and selections."""
    resume: str = Field(default="no", min_length=1)
    """`no`: a new run folder. `auto`: go on in this run's folder from its newest whole checkpoint, or start there.
    A checkpoint's folder: start a new run folder from it."""
    max_steps: int = Field(default=0, ge=0)
    """Optimizer steps, those before a resume included; 0 = no limit of steps."""
    max_train_s: float = Field(default=0.0, ge=0.0)
    """Seconds of training since the start or resume; 0 = no limit of time."""

    @model_validator(mode="after")
    def _name_is_a_folder(self) -> Self:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name) or not self.name.strip("."):
            raise ValueError(
                f"run.name must be letters, digits, dots, underscores and hyphens, not dots alone, got {self.name!r}"
            )
        return self

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if not self.max_steps and not self.max_train_s:
            raise ValueError("run.max_steps or run.max_train_s must be above 0, got 0 for both")
        return self
