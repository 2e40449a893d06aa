"""Updates of a tiny policy whose backend says what it was asked for."""

import numpy as np
import torch

from learner.backends.torch import TorchBackend
from learner.update import PolicyUpdate
from tests.support.learner_inputs import learner_config, random_group, tiny_policy


class Recording(TorchBackend):
    """The real backend, which also says what it was asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = []

    def accumulate(self, groups, proximal=None):
        self.calls.append(([group.group_id for group in groups], proximal))
        return super().accumulate(groups, proximal)

    def response_logprobs(self, groups):
        self.calls.append("response logprobs")
        return super().response_logprobs(groups)

    def optimizer_step(self, normaliser):
        self.calls.append(normaliser)
        return super().optimizer_step(normaliser)

    @property
    def accumulated(self):
        return [call[0] for call in self.calls if isinstance(call, tuple)]


def group(group_id=0, lengths=(5, 1, 9)):
    return random_group(np.random.default_rng(group_id), group_id, lengths=lengths, version=0)


def update_of(policy=None, **sections):
    learner = {"max_first_mismatch_nats": 100.0} | sections.pop("learner", {})
    config = learner_config(learner=learner, **{"optimizer": {"lr": 1e-2}} | sections)
    backend = Recording(policy or tiny_policy(), config)
    return PolicyUpdate(backend, config), backend


def weights(backend):
    return torch.cat([tensor.flatten() for _, tensor in backend.weights()]).clone()


def without_a_finite_logprob(group_id, token=2):
    """Its responses hold only a token whose embedding is made not a number."""
    made = group(group_id)
    for sample in made.samples:
        sample.token_ids[:] = token
    return made


def with_a_broken_token(token=2):
    policy = tiny_policy(tied=False)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[token] = torch.nan
    return policy
