"""How samples are drawn and rewarded, and how old they may be; when a prompt has enough is in configs/strategy.py."""

from pydantic import Field

from configs.base import Section


class Staleness(Section):
    """The hard bound on how old a trained token may be."""

    max: int = Field(default=2, ge=0)
    """η: learner's version at the gradient minus a token's version, at most. 0 = strictly on-policy."""


class Sampling(Section):
    """What is asked of the language model for each sample."""

    max_tokens: int = Field(default=24, ge=1)
    """Response tokens, at most; a response cut there counts as it stands."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Softmax temperature of training samples."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass; below 1 the behaviour logprobs are those of the cut distribution."""


class Reward(Section):
    """What is added to the verdict (1 for a right sample, 0 for a wrong one)."""

    overlong_tokens: int = Field(default=0, ge=0)
    """c of DAPO's overlong penalty: the last c tokens before sampling.max_tokens cost reward, linearly; 0 = off."""
    overlong_factor: float = Field(default=1.0, gt=0.0)
    """f: penalty of a response of sampling.max_tokens tokens."""
