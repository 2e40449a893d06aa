"""The policy as one module: what it computes, whose parameters it has, and under which names they leave."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.model_folder import ModelError
from learner.packing import pack, split_groups
from learner.policy import Policy, load_policy, sequence_logprobs
from tests.support.learner_inputs import random_group, tiny_llama, tiny_policy

SEQUENCES = [np.array([5, 9, 3, 7], dtype=np.int32), np.array([5, 9, 8], dtype=np.int32)]
CPU = torch.device("cpu")


def batch():
    rng = np.random.default_rng(0)
    return pack(split_groups([random_group(rng, 0), random_group(rng, 1)]))


def test_logprobs_of_fixed_sequences_are_the_models_own():
    policy = tiny_policy()
    assert policy.check_forward(SEQUENCES) < 1e-4
    assert [values.size for values in sequence_logprobs(policy, SEQUENCES, CPU)] == [3, 2]


def test_a_model_that_scales_its_logits_is_refused():
    class Scaled(type(tiny_llama())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.25
            return output

    model = tiny_llama()
    model.__class__ = Scaled
    with pytest.raises(ModelError, match="architecture is not supported"):
        Policy(model, 256).check_forward(SEQUENCES)


def test_a_head_with_a_bias_is_refused():
    model = tiny_llama(tied=False)
    model.lm_head = torch.nn.Linear(32, 97)
    with pytest.raises(ModelError, match="without bias"):
        Policy(model, 256)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_used_inside_a_call_of_the_module_that_owns_it(tied):
    policy = tiny_policy(tied=tied)
    called = set()
    for module in policy.modules():
        module.register_forward_pre_hook(lambda module, _: called.update(map(id, module.parameters(recurse=False))))
    logprobs, entropy = policy(batch(), 1.0)
    (logprobs.sum() + entropy.sum()).backward()
    with_gradient = {id(parameter) for parameter in policy.parameters() if parameter.grad is not None}
    assert with_gradient == called == {id(parameter) for parameter in policy.model.parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_call_with_parameters_that_exist_only_inside_their_modules_calls_gives_the_same(tied):
    """What an engine does that shards parameters: it fills them before a module's call and empties them after it."""
    plain, sharded = tiny_policy(tied=tied), tiny_policy(tied=tied)
    stored = {parameter: parameter.data for parameter in sharded.parameters()}

    def fill(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = stored[parameter]

    def empty(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0)

    for parameter in stored:
        parameter.data = torch.empty(0)
    for module in sharded.modules():
        module.register_forward_pre_hook(fill)
        module.register_forward_hook(empty)
    with torch.no_grad():
        for ours, theirs in zip(sharded(batch(), 0.7), plain(batch(), 0.7), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_leave_under_the_names_of_transformers_with_the_head(tied):
    policy = tiny_policy(tied=tied)
    weights = dict(policy.weights())
    assert weights.keys() == tiny_llama(tied=tied).state_dict().keys()
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    assert (head.data_ptr() == embedding.data_ptr()) is tied


@pytest.mark.parametrize("tied", [True, False])
def test_gathered_weights_are_saved_in_place_of_its_own(tmp_path, tied):
    policy = tiny_policy(tied=tied)
    gathered = {name: torch.full_like(tensor, 0.5) for name, tensor in policy.weights()}
    policy.save_model(tmp_path, gathered.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert all((parameter == 0.5).all() for parameter in loaded.parameters())


def test_a_saved_policy_is_loaded_again(tmp_path):
    policy = tiny_policy()
    policy.save_model(tmp_path)
    loaded = load_policy(str(tmp_path), 256, torch.float32)
    for ours, theirs in zip(loaded(batch(), 1.0), policy(batch(), 1.0), strict=True):
        assert torch.equal(ours, theirs)
