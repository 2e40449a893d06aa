"""How samples are drawn and rewarded, and how old they may be; when a prompt has enough is in configs/strategy.py."""

from pydantic import Field

from configs.base import Section

UNBOUNDED = 1_000_000
"""A `staleness.max` from here on bounds no run."""


class Staleness(Section):
    """The hard bound on how old a trained token may be."""

    max: int = Field(default=2, ge=0)
    """η: learner's version at the gradient minus a token's version, at most. 0 = strictly on-policy;
    1000000 = no bound."""

    @property
    def is_bounded(self) -> bool:
        """Whether samples can grow too old at all."""
        return self.max < UNBOUNDED


class Sampling(Section):
    """What is asked of the language model for each sample."""

    max_tokens: int = Field(default=24, ge=1)
    """Response tokens, at most; a response cut there counts as it stands."""
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    """Softmax temperature of training samples. vLLM takes 0.01 for anything below it."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass; below 1 only with a simulated learner: logprobs of samples are those of the cut distribution, the
    learner's are of the whole, and every ratio between them would be biased."""


class Reward(Section):
    """What is added to the verdict (1 for a right sample, 0 for a wrong one)."""

    overlong_tokens: int = Field(default=0, ge=0)
    """c of DAPO's overlong penalty: the last c tokens before sampling.max_tokens cost reward, linearly; 0 = off."""
    overlong_factor: float = Field(default=1.0, gt=0.0)
    """f: penalty of a response of sampling.max_tokens tokens."""
