"""The policy as one module: what it computes, whose parameters it has, and under which names they leave."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from configs.load import ConfigError
from configs.model_folder import ModelError
from learner.attention import ATTENTION_NAME, packed_attention
from learner.loading import load_policy
from learner.own_forward import own_logprobs
from learner.packing import pack, split_groups
from learner.policy import Policy, sequence_logprobs
from tests.support.learner_inputs import learner_config, random_group, tiny_llama, tiny_policy
from tests.support.live_memory import LiveMemory

SEQUENCES = [np.array([5, 9, 3, 7], dtype=np.int32), np.array([5, 9, 8], dtype=np.int32)]


def at(folder):
    return {"path": str(folder), "max_context_tokens": 16}


def batch():
    rng = np.random.default_rng(0)
    return pack(split_groups([random_group(rng, 0), random_group(rng, 1)]))


def test_fixed_sequences_have_a_logprob_for_all_but_the_first_token():
    policy = tiny_policy()
    parts = sequence_logprobs(policy, SEQUENCES, policy.device)
    assert [values.size for values in parts] == [3, 2]
    for ours, own in zip(parts, own_logprobs(policy.model, SEQUENCES), strict=False):
        np.testing.assert_allclose(ours, own.logprobs, atol=1e-4)


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
    loaded = load_policy(learner_config(model=at(tmp_path)), torch.float32)
    for ours, theirs in zip(loaded(batch(), 1.0), policy(batch(), 1.0), strict=True):
        assert torch.equal(ours, theirs)


def gradients(policy):
    logprobs, entropy = policy.train()(batch(), 0.8)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def test_checkpointed_activations_give_the_same_gradients(tmp_path):
    tiny_policy().save_model(tmp_path)
    plain, again = (
        load_policy(learner_config(model=at(tmp_path), learner={"activation_checkpointing": on}), torch.float32)
        for on in (False, True)
    )
    expected = gradients(plain)
    for name, gradient in gradients(again).items():
        assert torch.equal(gradient, expected[name]), name


def test_checkpointed_activations_need_less_memory_on_a_deep_narrow_model():
    # 12 layers: without, each keeps its attention weights and its MLP's inner states until the backward pass.
    peaks = []
    for is_checkpointed in (False, True):
        policy = tiny_policy(layers=12)
        if is_checkpointed:
            policy.checkpoint_activations()
        gradients(policy)  # gradients exist from here on
        with LiveMemory() as memory:
            gradients(policy)
        peaks.append(memory.peak_bytes)
    assert peaks[1] < 0.4 * peaks[0], peaks


@pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
def test_compiled_layers_give_the_same_gradients_also_with_checkpointed_activations():
    expected = gradients(tiny_policy())
    policy = tiny_policy()
    policy.checkpoint_activations()
    try:
        policy.compile_layers()
        assert all(parameter.grad is None for parameter in policy.parameters())
        for name, gradient in gradients(policy).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    finally:
        AttentionInterface.register(ATTENTION_NAME, packed_attention)


@pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
def test_without_a_compiler_compiling_is_refused(monkeypatch):
    torch.compiler.reset()  # of layers compiled before
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/absent/compiler"))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    try:
        with pytest.raises(ConfigError, match=r"learner.compile must be false here, torch.compile fails: .*compiler"):
            tiny_policy(layers=1).compile_layers()
    finally:
        AttentionInterface.register(ATTENTION_NAME, packed_attention)
