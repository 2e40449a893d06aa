"""LoRA: peft's gradients, peft's merge, and nobody outside the learner sees an adapter."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from configs import Config
from configs.lora import Lora
from configs.model_folder import ModelError
from configs.training import Learner, Optimizer
from learner.backends.torch import TorchBackend
from learner.own_forward import own_logprobs
from learner.policy import Policy, sequence_logprobs
from tests.support.learner_inputs import random_group, tiny_llama

LORA = Lora(rank=3, alpha=6.0, target_modules=["q_proj", "v_proj", "down_proj"])
SEQUENCES = [np.array([5, 9, 3, 7, 11, 2], dtype=np.int32), np.array([8, 4, 6], dtype=np.int32)]


def adapted_policy(lora=LORA, *, dtype=torch.float32, tied=True):
    """A policy whose adapters already change something."""
    policy = Policy(tiny_llama(dtype=dtype, tied=tied), 64, lora)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def peft_twin(policy, **model):
    """peft's own model around a fresh base, with the adapters of `policy`."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    twin = get_peft_model(tiny_llama(attention="eager", **model), config, autocast_adapter_dtype=False)
    ours = {name: tensor for name, tensor in policy.model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "lora_" in name:
                parameter.copy_(ours.pop(name.removeprefix("base_model.model.")))
    assert not ours
    return twin


def backend_of(policy, **optimizer):
    return TorchBackend(policy, Config(optimizer=Optimizer(**optimizer), lora=LORA, loss={"entropy_weight": 0.0}))


def test_adapter_gradients_are_those_of_peft_on_plain_sequences():
    policy = adapted_policy()
    twin = peft_twin(policy)
    groups = [random_group(np.random.default_rng(seed), seed) for seed in range(3)]
    backend = backend_of(policy)
    backend.accumulate(groups)
    total = torch.zeros(())
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor(np.concatenate([group.prompt_token_ids, sample.token_ids])).long()
            logprobs = twin(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            ratio = (logprobs[-sample.token_ids.size :] - torch.tensor(sample.logprobs)).exp()
            objective = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
            floor = 10.0 * sample.advantage
            total = total - (torch.clamp(objective, min=floor) if sample.advantage < 0 else objective).sum()
    total.backward()
    theirs = torch.cat([parameter.grad.reshape(-1) for parameter in twin.parameters() if parameter.grad is not None])
    assert backend._grads_N.norm() > 1.0
    torch.testing.assert_close(backend._grads_N, theirs, rtol=1e-3, atol=1e-4)


def test_merged_weights_are_those_of_pefts_merge():
    policy = adapted_policy()
    expected = dict(peft_twin(policy).merge_and_unload().named_parameters(remove_duplicate=False))
    ours = dict(policy.weights())
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0.0, atol=1e-7, msg=name)
    assert not torch.equal(
        ours["model.layers.0.self_attn.q_proj.weight"], tiny_llama().model.layers[0].self_attn.q_proj.weight
    )


def test_merged_bfloat16_weights_are_rounded_once():
    policy = adapted_policy(dtype=torch.bfloat16)
    layer = policy.model.model.layers[1].mlp.down_proj
    down, up = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = (layer.base_layer.weight.double() + 2.0 * up @ down).to(torch.bfloat16)
    ours = dict(policy.weights())["model.layers.1.mlp.down_proj.weight"]
    # A float32 sum can fall on the other side of a bfloat16 tie.
    assert (ours != exact).float().mean() < 1e-3
    assert not torch.equal(ours, layer.base_layer.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_that_go_out_are_those_of_the_base_model(tied):
    plain = {name: tensor.shape for name, tensor in Policy(tiny_llama(tied=tied), 64).weights()}
    assert {name: tensor.shape for name, tensor in adapted_policy(tied=tied).weights()} == plain


def test_only_adapters_train_and_only_they_have_optimizer_state():
    policy = adapted_policy()
    before = {name: tensor.detach().clone() for name, tensor in policy.model.named_parameters()}
    backend = backend_of(policy, lr=1e-2)
    gradient = backend.accumulate([random_group(np.random.default_rng(0))])
    assert gradient.sums.tokens
    backend.optimizer_step(gradient.sums.tokens)
    changed = {name for name, tensor in policy.model.named_parameters() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    count = sum(tensor.numel() for name, tensor in before.items() if "lora_" in name)
    assert backend._master_N.numel() == backend._grads_N.numel() == count


def test_what_is_published_computes_what_the_policy_computes():
    policy = adapted_policy()
    backend = backend_of(policy, lr=1e-2)
    backend.accumulate([random_group(np.random.default_rng(0))])
    backend.optimizer_step(9)
    assert policy.check_forward(own_logprobs(policy.model, SEQUENCES)) < 1e-4
    worker = tiny_llama()
    worker.load_state_dict(dict(backend.weights()))
    for ours, theirs in zip(
        backend.sequence_logprobs(SEQUENCES),
        sequence_logprobs(Policy(worker, 64), SEQUENCES, torch.device("cpu")),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_checkpoint_loads_merged_in_transformers_and_alone_in_peft(tmp_path):
    policy = adapted_policy()
    backend_of(policy).save_model(tmp_path)
    tiny_llama().save_pretrained(tmp_path / "base")
    ids = torch.tensor([[5, 9, 3, 7, 11]])
    with torch.inference_mode():
        expected = policy.model(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        alone = PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(alone(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_all_linear_adapts_every_linear_layer_but_the_head():
    policy = adapted_policy(Lora(rank=2), tied=False)
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, _ in policy.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("target", ["nothing_proj", "lm_head", "embed_tokens"])
def test_layers_that_cannot_get_adapters_are_refused_by_key(target):
    with pytest.raises(ModelError, match=r"lora\.target_modules must name"):
        Policy(tiny_llama(tied=False), 64, Lora(rank=2, target_modules=[target]))


def test_a_target_that_no_layer_has_is_named_though_another_one_fits():
    lora = Lora(rank=2, target_modules=["q_proj", "v_porj", "self_attn.o_proj", "roj"])
    with pytest.raises(ModelError, match=r"lora\.target_modules must name .* got v_porj, roj; allowed: .*v_proj"):
        Policy(tiny_llama(), 64, lora)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft's
def test_layers_that_are_no_linear_ones_are_refused_though_peft_adapts_them():
    # GPT-2's Conv1D keeps its weight transposed, so the merge would be another one.
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    lora = Lora(rank=2, target_modules=["c_attn"])
    with pytest.raises(ModelError, match="must name linear layers"):
        Policy(GPT2LMHeadModel(config), 64, lora)


def test_a_fingerprint_tells_alphas_and_bases_apart_and_not_what_trains():
    def fingerprint(alpha=6.0, seed=0):
        policy = Policy(tiny_llama(seed=seed), 64, Lora(rank=3, alpha=alpha))
        return policy, policy.fingerprint("torch", 1)

    policy, first = fingerprint()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                parameter.add_(1.0)
    assert policy.fingerprint("torch", 1) == first == fingerprint()[1]
    assert (first.lora_alpha, fingerprint(alpha=12.0)[1].lora_alpha) == (6.0, 12.0)
    assert first.frozen != fingerprint(seed=1)[1].frozen
    assert (plain := Policy(tiny_llama(), 64).fingerprint("torch", 1)).lora_alpha == 0.0
    assert plain.frozen == ""


def test_contradictory_settings_are_refused():
    with pytest.raises(ValidationError, match="all-linear"):
        Lora(rank=2, target_modules=["all-linear", "q_proj"])
    with pytest.raises(ValidationError, match=r"lora\.rank must be 0 with learner\.kind = simulated, got 2"):
        Config(lora=Lora(rank=2), learner=Learner(kind="simulated"))
