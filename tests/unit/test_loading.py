"""Loading a policy or a reference: what it computes is the model's own, and what cannot be is refused by name."""

import logging

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configs import Config
from configs.load import ConfigError
from configs.model_folder import ModelError
from configs.training import Learner
from learner import loading
from learner.attention import ATTENTION_NAME, packed_attention
from learner.backends.torch import TorchBackend
from learner.loading import choose_device, load_policy, load_reference, wants_liger
from learner.own_forward import own_logprobs
from learner.packing import pack, split_groups
from learner.policy import Policy
from tests.support.learner_inputs import VOCABULARY, learner_config, random_group, tiny_llama, tiny_policy

RNG = np.random.default_rng(0)
SEQUENCES = [RNG.integers(3, VOCABULARY, size).astype(np.int32) for size in (12, 9)]
CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def at(folder, max_context_tokens=16):
    return {"path": str(folder), "max_context_tokens": max_context_tokens}


def batch():
    rng = np.random.default_rng(0)
    return pack(split_groups([random_group(rng, 0), random_group(rng, 1)]))


def checked(model, folder, sequences=SEQUENCES):
    """The policy of `model` as a learner loads it: from a folder, and checked."""
    model.save_pretrained(folder)
    return load_policy(learner_config(model=at(folder)), torch.float32, sequences)


def gpt2(probability):
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3,
            attn_pdrop=probability, embd_pdrop=probability, resid_pdrop=probability, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gemma2(**settings):
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **settings))


def gpt_oss():
    torch.manual_seed(0)
    return GptOssForCausalLM(
        GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=64, dtype=torch.float32)
    )


def test_the_check_packs_each_sequence_alone_and_responses_of_one_prompt():
    policy = tiny_policy()
    own = own_logprobs(policy.model, SEQUENCES)
    assert [each.tokens.size for each in own] == [12, 9, 12]
    assert own[2].tokens.tolist() == [SEQUENCES[0][0], *SEQUENCES[0][:0:-1]]
    shapes = []
    forward = policy.forward
    policy.forward = lambda packed, temperature: (shapes.append(packed.lengths_S.tolist()), forward(packed, 1.0))[1]
    assert policy.check_forward(own) < 1e-4
    assert shapes == [[11, 8, 11, 11, 11]]


def test_attention_is_compared_with_transformers_own_and_put_back():
    policy = tiny_policy()
    named = policy.model.config._attn_implementation
    own = own_logprobs(policy.model, SEQUENCES)
    assert policy.model.config._attn_implementation == named != "eager"
    plain = tiny_llama(attention="eager")
    for each in own:
        ids = torch.from_numpy(each.tokens).long()
        with torch.inference_mode():
            logprobs = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(each.logprobs, logprobs, atol=1e-5)


def test_the_check_is_not_blurred_by_bfloat16_and_leaves_the_weights_as_they_were():
    policy = tiny_policy(dtype=torch.bfloat16)
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in policy.named_parameters()}
    assert policy.check_forward(own_logprobs(policy.model, SEQUENCES)) < 1e-4
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in policy.named_parameters()} == before
    assert policy(batch(), 1.0)[0].requires_grad


def test_attention_sinks_are_refused_though_nothing_else_is_missing(tmp_path):
    with pytest.raises(ModelError, match="GptOssForCausalLM"):
        checked(gpt_oss(), tmp_path)


def test_weights_are_the_old_ones_after_a_pass_that_failed():
    model = gemma2().to(torch.bfloat16)
    model.set_attn_implementation("adastream_packed")
    dtypes = [parameter.dtype for parameter in model.parameters()]
    with pytest.raises(ModelError, match="Gemma2ForCausalLM"):
        Policy(model, 256).check_forward(own_logprobs(model, SEQUENCES))
    assert [parameter.dtype for parameter in model.parameters()] == dtypes


def test_kernels_that_compute_something_else_are_refused(tmp_path, monkeypatch):
    def triple(model, options):
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: 3.0 * output)

    monkeypatch.setattr(loading, "wants_liger", lambda *_, **__: True)
    monkeypatch.setattr(loading, "apply_liger_kernel", lambda model, options: None)
    checked(tiny_llama(), tmp_path)
    monkeypatch.setattr(loading, "apply_liger_kernel", triple)
    with pytest.raises(ModelError, match=r"must equal the model's own .* not supported: LlamaForCausalLM"):
        checked(tiny_llama(), tmp_path)


def test_a_model_that_scales_its_logits_is_refused():
    class Scaled(type(tiny_llama())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.25
            return output

    model = tiny_llama()
    model.__class__ = Scaled
    with pytest.raises(ModelError, match="architecture is not supported: Scaled"):
        Policy(model, 256).check_forward(own_logprobs(model, SEQUENCES))


def test_a_soft_cap_is_refused_and_the_same_model_without_one_is_not(tmp_path):
    with pytest.raises(ModelError, match=r"Gemma2ForCausalLM is not supported: .*cap"):
        checked(gemma2(), tmp_path)
    checked(gemma2(attn_logit_softcapping=None, final_logit_softcapping=None), tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(Gemma2Config, {"attn_logit_softcapping": None, "final_logit_softcapping": None}), (MistralConfig, {})],
)
def test_a_window_shorter_than_the_context_is_refused_and_named(tmp_path, kind, settings):
    """Gemma's layers keep their window themselves, Mistral's ask the configuration; short sequences fit into both."""
    fits, short = (
        AutoModelForCausalLM.from_config(kind(**SHAPE, sliding_window=size, **settings)) for size in (16, 15)
    )
    sequences = [tokens[:4] for tokens in SEQUENCES]
    checked(fits, tmp_path, sequences)
    name = type(short).__name__
    with pytest.raises(ModelError, match=rf"max_context_tokens must be at most 15, .*\({name}\) sees, got 16"):
        checked(short, tmp_path, sequences)
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is packed_attention


def test_a_model_whose_attention_cannot_be_replaced_is_refused(tmp_path):
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ModelError, match="BloomForCausalLM is not supported: its attention cannot be replaced"):
        checked(model, tmp_path)


def test_training_draws_nothing_at_random_and_says_what_it_switched_off(tmp_path, caplog):
    group = random_group(np.random.default_rng(0))
    with caplog.at_level(logging.INFO, logger="learner.loading"):
        policy = checked(gpt2(0.1), tmp_path)
    backend = TorchBackend(policy, Config())
    assert policy.trunk.training
    first, second = (backend.response_logprobs([group]) for _ in range(2))
    for key, logprobs in first.items():
        np.testing.assert_array_equal(logprobs, second[key])
    assert backend.accumulate([group]).sums.tokens == 15
    assert "attn_pdrop 0.1" in caplog.text
    assert "resid_pdrop 0.1" in caplog.text


def test_dropout_that_modules_keep_as_numbers_is_switched_off_as_well(tmp_path):
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.3))
    policy = checked(llama, tmp_path / "llama").train()
    assert policy.model.model.layers[0].self_attn.attention_dropout == 0.0
    opt = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, dropout=0.3, layerdrop=0.5, init_std=0.3,
    )  # fmt: skip
    policy = checked(OPTForCausalLM(opt), tmp_path / "opt").train()
    assert torch.equal(policy(batch(), 1.0)[0], policy(batch(), 1.0)[0])


def test_the_check_sees_what_is_random_in_training_mode_only():
    model = gpt2(0.3)
    model.set_attn_implementation("adastream_packed")
    for layer in model.transformer.h:
        layer.attn.attn_dropout.p = 0.0
    with pytest.raises(ModelError, match="must equal the model's own"):
        Policy(model, 256).check_forward(own_logprobs(model, SEQUENCES))


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = learner_config(model=at(tmp_path), learner={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"learner.device is cuda, but torch finds no CUDA device"):
        load_policy(config)


@pytest.mark.parametrize(
    ("device", "has_cuda", "chosen"),
    [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_the_device_is_the_one_asked_for_or_the_best_there_is(monkeypatch, device, has_cuda, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert choose_device(Learner(device=device)) == torch.device(chosen)


def test_fused_triton_kernels_are_for_cuda_where_they_are_installed():
    cuda = torch.device("cuda")
    assert wants_liger(cuda, is_installed=True)
    assert not wants_liger(cuda, is_installed=False)
    assert not wants_liger(CPU, is_installed=True)


def test_a_reference_is_loaded_frozen_and_only_where_the_loss_asks_for_it(tmp_path, monkeypatch):
    tiny_policy(seed=0).save_model(tmp_path / "policy")
    tiny_policy(seed=1).save_model(tmp_path / "other")
    policy = tiny_policy()
    built = []
    monkeypatch.setattr(Policy, "__init__", spying(Policy.__init__, built))
    model = at(tmp_path / "policy")
    assert load_reference(learner_config(model=model), policy) is None
    assert built == []
    own = load_reference(learner_config(model=model, loss={"kl": {"weight": 0.1}}), policy, SEQUENCES)
    kl = {"weight": 0.1, "reference": str(tmp_path / "other")}
    other = load_reference(learner_config(model=model, loss={"kl": kl}), policy)
    assert len(built) == 2
    for loaded, seed in ((own, 0), (other, 1)):
        assert torch.equal(loaded(batch(), 1.0)[0], tiny_policy(seed=seed)(batch(), 1.0)[0])
        assert not any(module.training for module in loaded.modules())
        assert not any(parameter.requires_grad for parameter in loaded.parameters())


def with_reference(folder):
    return learner_config(model=at(folder), loss={"kl": {"weight": 0.1, "reference": str(folder)}})


def test_a_reference_that_is_not_there_is_named_by_its_own_key(tmp_path):
    with pytest.raises(ModelError, match=r"loss.kl.reference .*absent does not exist"):
        load_reference(with_reference(tmp_path / "absent"), tiny_policy())


def test_a_reference_of_another_vocabulary_is_refused_with_both_sizes(tmp_path):
    LlamaForCausalLM(LlamaConfig(**(SHAPE | {"vocab_size": 101}))).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"loss.kl.reference .* must have .* model.path, 97 tokens, got 101"):
        load_reference(with_reference(tmp_path), tiny_policy())


def test_a_reference_that_cannot_be_computed_is_refused_at_the_start(tmp_path):
    gemma2().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Gemma2ForCausalLM is not supported"):
        load_reference(with_reference(tmp_path), tiny_policy(), SEQUENCES)


def spying(initialise, calls):
    def wrapped(self, *arguments):
        calls.append(self)
        initialise(self, *arguments)

    return wrapped
