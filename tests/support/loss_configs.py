"""One configuration of every objective, mask, aggregation and penalty, by name."""

from configs.loss import Loss

TIS = {"rule": "tis", "cap": 1.4}
LOSSES = {
    "ppo": Loss(),
    "ppo, narrow": Loss(clip_low=0.05, clip_high=0.05, dual_clip=1.2),
    "ppo, m2po": Loss(m2_budget=0.15),
    "cispo": Loss(objective="cispo"),
    "cispo, both bounds": Loss(objective="cispo", clip_low=0.3, clip_high=0.2),
    "gspo": Loss(objective="gspo"),
    "gspo, wide": Loss(objective="gspo", clip_low=0.4, clip_high=0.4, dual_clip=1.1, aggregation="token_mean"),
    "reinforce": Loss(objective="reinforce"),
    "reinforce, tis": Loss(objective="reinforce", mismatch=TIS),
    "reinforce, tis by sequence": Loss(objective="reinforce", mismatch={**TIS, "level": "sequence"}),
    "reinforce, icepop": Loss(objective="reinforce", mismatch={"rule": "icepop", "low": 0.8, "high": 1.5}),
    "reinforce, tis, m2po": Loss(objective="reinforce", mismatch=TIS, m2_budget=0.1),
    "decoupled": Loss(objective="decoupled"),
    "decoupled, recompute": Loss(objective="decoupled", proximal="recompute"),
    "decoupled, icepop": Loss(objective="decoupled", mismatch={"rule": "icepop", "low": 0.8, "high": 1.5}),
    "decoupled, tis by sequence": Loss(objective="decoupled", mismatch={**TIS, "level": "sequence"}),
    "decoupled, m2po": Loss(objective="decoupled", m2_budget=0.1),
    "likelihood": Loss(objective="likelihood"),
    "likelihood, icepop": Loss(objective="likelihood", mismatch={"rule": "icepop", "low": 0.8, "high": 1.5}),
    "sequence mean": Loss(aggregation="sequence_mean"),
    "constant": Loss(aggregation="constant", constant_tokens=24),
    "k1": Loss(kl={"weight": 0.3, "estimator": "k1"}),
    "k2": Loss(kl={"weight": 0.3, "estimator": "k2"}),
    "k3": Loss(kl={"weight": 0.3, "estimator": "k3"}, aggregation="sequence_mean"),
    "no entropy bonus": Loss(entropy_weight=0.0),
}
