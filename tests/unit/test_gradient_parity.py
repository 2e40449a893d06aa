"""Loss and gradient of a micro-batch against one plain pass of the model for each response, at any temperature."""

import numpy as np
import pytest
import torch

from configs.training import Learner
from learner.gradient import MicroBatchLoss, micro_batches
from learner.policy import Policy
from tests.support.learner_inputs import changed, learner_config, random_group, tiny_llama, with_token_values

CPU = torch.device("cpu")
ENTROPY, KL, CAP = 0.05, 0.3, 2.0
LOSS = {
    "objective": "decoupled", "proximal": "recompute", "entropy_weight": ENTROPY,
    "kl": {"weight": KL, "estimator": "k3"}, "mismatch": {"cap": CAP},
}  # fmt: skip


def models():
    """A policy, the same before a few steps (the proximal one), and the reference; each packed and plain."""
    policy, before, reference = (tiny_llama(seed=seed) for seed in (0, 0, 5))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    plain = [tiny_llama(attention="eager") for _ in range(3)]
    for ours, theirs in zip((policy, before, reference), plain, strict=True):
        theirs.load_state_dict(ours.state_dict())
    return [Policy(model, 256) for model in (policy, before, reference)], plain


def plain_pass(model, prompt, sample, temperature):
    """Logprob and entropy of each token of one response."""
    ids = torch.from_numpy(np.concatenate([prompt, sample.token_ids]).astype(np.int64))
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, ids[len(prompt) :, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def plain_loss(plain, made, temperature):
    """The sum of the losses of all tokens with their weights, and the sum of those."""
    policy, before, reference = plain
    total, weight = 0.0, 0.0
    for group in made:
        for sample in group.samples:
            logprobs, entropy = plain_pass(policy, group.prompt_token_ids, sample, temperature)
            with torch.no_grad():
                proximal, _ = plain_pass(before, group.prompt_token_ids, sample, temperature)
                distance_to, _ = plain_pass(reference, group.prompt_token_ids, sample, temperature)
            advantages = torch.from_numpy(sample.token_advantages)
            ratio = (logprobs - proximal).exp()
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            cap = (proximal - torch.from_numpy(sample.logprobs)).exp().clamp(max=CAP)
            away = distance_to - logprobs
            value = cap * objective + ENTROPY * entropy - KL * (away.exp() - 1.0 - away)
            total = total - (torch.from_numpy(sample.token_weights) * value).sum()
            weight += sample.token_weights.sum()
    return total, weight


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_values_and_gradients_are_those_of_a_plain_loop_over_responses(temperature):
    rng = np.random.default_rng(0)
    made = [with_token_values(rng, random_group(rng, n, lengths=(5, 3, 8 - n))) for n in range(3)]
    packed, plain = models()
    for group in made:
        for place, sample in enumerate(group.samples):
            near = plain_pass(plain[1], group.prompt_token_ids, sample, temperature)[0].detach().numpy()
            shifted = np.minimum(near + rng.normal(0.0, 0.5, near.size), 0.0).astype(np.float32)
            group.samples[place] = changed(sample, logprobs=shifted)
    assert any((sample.token_weights == 0).any() for group in made for sample in group.samples)
    config = learner_config(sampling={"max_tokens": 8, "temperature": temperature}, loss=LOSS)
    [segments] = micro_batches(made, Learner(micro_batch_tokens=4096))
    policy, before, reference = packed
    proximal = MicroBatchLoss(before, reference, config, CPU).response_logprobs(segments)
    loss, part = MicroBatchLoss(policy, reference, config, CPU)(segments, proximal)
    expected, weight = plain_loss(plain, made, temperature)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert part.sums.normaliser == pytest.approx(weight, rel=1e-6)
    assert 0 < part.sums.clipped < part.sums.tokens
    theirs = dict(plain[0].named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert (parameter.grad - theirs[name].grad).norm() < 1e-3 * theirs[name].grad.norm()
