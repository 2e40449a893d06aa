"""A plan as text and as JSON."""

import math
from dataclasses import asdict

from engine.planning.propose import KEPT_GROUPS, TOLERANCE, Plan, Size
from engine.planning.rules_of_thumb import RulesOfThumb
from engine.planning.trial import NO_EXPIRY, Outcome

GB = 1e9
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
NOT_COUNTED = (
    "prefill, unless the generation speed was measured with it",
    "the pause of weight updates",
    "learner GPUs are assumed to add up; the plain learner is one process on one GPU",
    "how pass rates change while the model learns",
)
READING = (
    "samples/group, solved and w(.1)/w(.5) are exact, without expiry; the others are simulated at the chosen η.",
    "samples/group counts visits without a group. lost: visits with a signal that ended without a fresh sample of one",
    "class. dropped: sealed groups that grew older than η.",
    "w(.1)/w(.5): how much more a visit of a prompt with p = 0.1 weighs than one with p = 0.5. A cheaper group",
    "is not a better one: compare costs at equal K, and see what the exit teaches (docs/strategies.md).",
)


_NO_GROUP = "no useful group was simulated"


def as_text(plan: Plan) -> str:
    """For people."""
    lines = [
        f"pass rates {plan.question.pass_rate}: mean {plan.p_mean:.3f}, median {plan.p_median:.3f}",
        "",
        "PROPOSAL",
        *(f"  {name:18}{text}" for name, text in reasons(plan).items()),
        "",
        f"WHAT IT COSTS ({_noise(plan)})",
        _HEAD,
        *(_row(outcome) for outcome in (plan.chosen, *plan.alternatives)),
        *(f"  {text}" for text in READING),
        "",
        "THE PROPOSAL AT OTHER η (simulated)",
        *(_eta_row(outcome) for outcome in plan.etas),
        "",
        *_thumb_lines(plan.rules, plan.p_median),
        "",
        *_memory_lines(plan),
        "",
        "NOT COUNTED",
        *(f"  {text}" for text in NOT_COUNTED),
        "",
        "RUN WITH",
        f"  python -m engine.serve --config YOURS.toml {' '.join(plan.overrides)}",
    ]
    return "\n".join(lines) + "\n"


def reasons(plan: Plan) -> dict[str, str]:
    """Each proposed value and why."""
    size = plan.size
    return {
        "k_pos = k_neg": f"{size.k}: the smallest from 2 on within {TOLERANCE - 1:.0%} of the cheapest GPU time a kept"
        f" sample ({', '.join(f'K = {s.k}: {s.gpu_s_per_kept:.3g} s' for s in plan.sizes)})",
        "n_max": f"{size.n_max} = {size.n_max // size.k} K: the smallest that makes {KEPT_GROUPS:.0%} of the groups of"
        f" 64 K; {_size_in_words(size)}",
        "width": "0 = by need: a new arm asks for "
        f"{2 * size.k} samples, wastes none, and raises its width only before scarce samples expire",
        "workers": _split_in_words(plan),
        "staleness.max": _eta_in_words(plan),
        "gives": _rate_in_words(plan),
    }


def _size_in_words(size: Size) -> str:
    made = f"{size.cost.useful:.0%} of visits make one, at {_cost(size.cost.per_useful)} samples each"
    return made if size.cost.useful >= 0.5 else f"{made}: most prompts are too hard or too easy for this model"


def _split_in_words(plan: Plan) -> str:
    chosen, gpus = plan.chosen, plan.question.gpus
    busy, idle = chosen.report.worker_busy_ratio, chosen.report.learner_idle_ratio
    state = f"slots busy {busy:.0%}, learner idle {_percent(idle)}"
    if gpus == 1:
        return f"1: the one GPU generates {chosen.split.generating:.0%} of the time and learns in the rest; {state}"
    side = "generation" if limited_by(chosen) == "generation" else "learning"
    return (
        f"{chosen.split.workers} of {gpus} GPUs generate, {gpus - chosen.split.workers} learn; {side} is the slower"
        f" side ({state})"
    )


def limited_by(outcome: Outcome) -> str:
    """The slower side of a run: `generation` or `learner`."""
    waits = 1.0 - outcome.report.worker_busy_ratio
    return "learner" if waits > (outcome.report.learner_idle_ratio or 0.0) else "generation"


def _eta_in_words(plan: Plan) -> str:
    *_, used, free = plan.etas
    extra = _extra_tokens(used, free)
    if extra is None:
        where = "there" if free.report.useful_groups else "without expiry"
        return f"{used.max_staleness}: the largest tried; {_NO_GROUP} {where}, so there is nothing to compare"
    if extra > TOLERANCE - 1.0:
        return (
            f"{used.max_staleness}: even there a useful group costs {_percent(extra)} more tokens than without expiry;"
            " more groups a step or fewer slots would help"
        )
    return (
        f"{used.max_staleness}: the smallest tried whose useful groups cost at most {TOLERANCE - 1:.0%} more tokens"
        f" than without expiry (here {_percent(extra)})"
    )


def _extra_tokens(outcome: Outcome, free: Outcome) -> float | None:
    tokens, base = outcome.report.tokens_per_useful_group, free.report.tokens_per_useful_group
    return tokens / base - 1.0 if tokens and base else None


def _rate_in_words(plan: Plan) -> str:
    rate, batch = plan.chosen.useful_groups_per_min, plan.question.groups_per_step
    if not rate:
        return f"unknown: {_NO_GROUP}; more --samples, or easier prompts"
    return f"{rate:.1f} useful groups a minute, a step of {batch} every {60.0 * batch / rate:.0f} s"


def _noise(plan: Plan) -> str:
    report = plan.chosen.report
    if not report.useful_groups:
        return f"{report.prompts} prompts a run: {_NO_GROUP}"
    error = (report.samples_per_prompt_se or 0.0) / report.samples_per_prompt_mean
    return f"{report.prompts} prompts a run, about ± {2.0 * error:.0%}"


_HEAD = (
    f"  {'':24}{'K':>4}{'N_max':>6}{'samples/group':>15}{'solved':>8}{'tokens/group':>14}{'groups/min':>12}"
    f"{'waste':>8}{'lost':>7}{'dropped':>9}{'w(.1)/w(.5)':>13}{'workers':>9}"
)


def _row(outcome: Outcome) -> str:
    own, tokens = outcome.strategy, outcome.report.tokens_per_useful_group
    k = "-" if own.name == "dapo" else str(own.k_pos)
    return (
        f"  {outcome.label:24}{k:>4}{own.n_max:>6}{_cost(outcome.samples_per_useful_group):>15}"
        f"{outcome.success_share:>8.3f}{'-' if tokens is None else f'{tokens:.0f}':>14}"
        f"{outcome.useful_groups_per_min:>12.1f}{outcome.waste_share:>8.1%}{outcome.lost_share:>7.1%}"
        f"{outcome.dropped_share:>9.1%}"
        f"{outcome.hard_weight:>13.2f}{outcome.split.workers:>9}"
    )


def _cost(samples: float) -> str:
    return f"{samples:.2f}" if samples < 1e6 else "> 1e6"


def _eta_row(outcome: Outcome) -> str:
    report = outcome.report
    eta = "no expiry" if outcome.max_staleness == NO_EXPIRY else f"η = {outcome.max_staleness}"
    tokens = "-" if report.tokens_per_useful_group is None else f"{report.tokens_per_useful_group:.0f}"
    shares = f"waste {outcome.waste_share:.1%}, lost {outcome.lost_share:.1%}, dropped {outcome.dropped_share:.1%}"
    return (
        f"  {eta:12}{tokens:>8} tokens a useful group, {outcome.useful_groups_per_min:.1f} groups a minute, {shares},"
        f" mean age {report.staleness_mean or 0.0:.2f}"
    )


def _thumb_lines(rules: RulesOfThumb, p_median: float) -> list[str]:
    weights = ", ".join(f"{weight:.2f} at p = {rate}" for rate, weight in rules.weights.items())
    table = (
        f"{rules.hardware.task}: {rules.hardware.gpu_memory_per_batch} of GPU memory a batch,"
        f" {rules.hardware.sampling_threads} sampling threads"
        if rules.hardware
        else f"no row for p_median = {p_median:.3f} (base task > 0.3: 12 GB, 4-6 threads; hard < 0.1: 24 GB, 8-12)"
    )
    return [
        f"FOR COMPARISON ({rules.source})",
        f"  K_init = max(2, batch_size/16) = {rules.k_init}, N_max = 8 K = {rules.n_max}",
        f"  w = min(1, sqrt(p/p_median)) = {weights}: takes weight from hard prompts; not proposed",
        f"  hardware table: {table}",
    ]


def _memory_lines(plan: Plan) -> list[str]:
    memory, question = plan.memory, plan.question
    total = (memory.generation_weights + memory.kv_cache) / GB
    return [
        "MEMORY (estimates)",
        f"  a generating GPU: {total:.1f} GB = bf16 weights {memory.generation_weights / GB:.1f} + KV cache of"
        f" {question.slots} full slots {memory.kv_cache / GB:.1f} ({memory.kv_bytes_per_token / 1024:.0f} KiB a token)",
        f"  a learner on one GPU: {memory.learner / GB:.1f} GB = 18 bytes a parameter, plus activations",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def as_json(plan: Plan) -> dict[str, Json]:
    """For programs: the same, in base units; infinite costs are null."""
    question, memory = plan.question, plan.memory
    return {
        "inputs": asdict(question),
        "pass_rate_mean": plan.p_mean,
        "pass_rate_median": plan.p_median,
        "proposal": {
            "k_pos": plan.size.k,
            "k_neg": plan.size.k,
            "n_max": plan.size.n_max,
            "width": plan.chosen.strategy.width,
            "workers": plan.chosen.split.workers,
            "learner_gpus": question.gpus - plan.chosen.split.workers,
            "max_staleness": plan.chosen.max_staleness,
            "limited_by": limited_by(plan.chosen) if question.gpus > 1 else "both in turns",
            "useful_groups_per_min": plan.chosen.useful_groups_per_min,
        },
        "reasons": dict(reasons(plan)),
        "costs": [_outcome_json(outcome) for outcome in (plan.chosen, *plan.alternatives)],
        "staleness": [_outcome_json(outcome) for outcome in plan.etas],
        "sizes": [
            {"k": size.k, "n_max": size.n_max, "gpu_s_per_kept_sample": size.gpu_s_per_kept} for size in plan.sizes
        ],
        "rules_of_thumb": asdict(plan.rules),
        "memory_estimate": {
            "generation_bytes": memory.generation_weights + memory.kv_cache,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "learner_bytes": memory.learner,
        },
        "not_counted": list(NOT_COUNTED),
        "overrides": list(plan.overrides),
    }


def _outcome_json(outcome: Outcome) -> dict[str, Json]:
    own, report = outcome.strategy, outcome.report
    return {
        "label": outcome.label,
        "strategy": own.name,
        "k": None if own.name == "dapo" else own.k_pos,
        "n_max": own.n_max,
        "width": own.width,
        "futility": own.futility,
        "max_staleness": None if outcome.max_staleness == NO_EXPIRY else outcome.max_staleness,
        "workers": outcome.split.workers,
        "samples_per_useful_group": _finite(outcome.samples_per_useful_group),
        "success_share": outcome.success_share,
        "hard_weight": outcome.hard_weight,
        "tokens_per_useful_group": report.tokens_per_useful_group,
        "useful_groups_per_min": outcome.useful_groups_per_min,
        "waste_share": outcome.waste_share,
        "lost_share": outcome.lost_share,
        "dropped_share": outcome.dropped_share,
        "worker_busy_ratio": report.worker_busy_ratio,
        "learner_idle_ratio": report.learner_idle_ratio,
        "staleness_mean": report.staleness_mean,
        "prompts": report.prompts,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
