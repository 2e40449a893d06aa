"""What a simulated run says: one record, the same keys every time, as JSON or as a few lines to read."""

import math
from dataclasses import asdict, dataclass

from engine.simulation.books import UNIT, Books
from engine.simulation.driver import Driver
from engine.simulation.law import Laws

_TEXT_ONLY = ("vacant_places",)
Value = str | int | float | dict[str, float] | None


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a run over the visits of `prompts` prompts; None where nothing was there to measure.

    Counts of samples, tokens and groups are those of these visits. Other prompts follow them in the queue, so that the
    slots stay full, until 99 % of these visits have ended; busy and idle are measured until then. The rest of the run
    waits for the last answers: a lognormal length may be fifty times the mean.
    """

    strategy: str
    """`strategy.name`."""
    prompts: int
    """`sim.prompts`."""
    samples_per_prompt_mean: float
    """Counted samples of a visit; a greedy response is none. Failed visits are left out of this and of all means."""
    samples_per_prompt_se: float | None
    """Standard error of that mean, visits taken as independent (those of one prompt are not, in several epochs)."""
    success_rate: float
    """Share of visits that ended `solved`: for filter, dapo and reject the valid ones, with both classes."""
    zero_signal_rate: float
    """Share of visits whose pool carries no gradient (no spread; for right-only strategies: no right sample; under
    `remax`: every reward that of the greedy response; under `reinforce++`: none)."""
    kept_length_ratio_right: float | None
    """Mean tokens of the kept right samples that reached a gradient over the mean of their law."""
    kept_length_ratio_wrong: float | None
    """The same of wrong ones."""
    pool_mean_bias: float | None
    """Mean over visits of the share of right samples in the pool minus the prompt's pass rate."""
    implied_weight: dict[str, float]
    """Pass rate -> measured w of E[gradient of a visit] = w·∇p (kept samples averaged in their group); only where
    `sim.pass_rate` is a number, a list or a profile of few rates, and 0 < p < 1."""
    tokens_generated: int
    """Counted and wasted, and those of greedy responses."""
    tokens_wasted: int
    """Tokens of samples that never counted: aborted, failed, scored behind the stopping sample."""
    useful_groups: int
    """Groups with an advantage, of visits that were solved, that reached a gradient. What an exhausted visit still
    trains (one right sample of 32, say) is not counted, for any strategy."""
    tokens_per_useful_group: float | None
    """tokens_generated / useful_groups."""
    worker_busy_ratio: float
    """Share of the slots' time in use."""
    learner_idle_ratio: float | None
    """Share of the learner's time, from its first step on, in which it waited for groups."""
    staleness_max: int
    """Of a kept sample at its gradient: learner's version minus that of its oldest token."""
    staleness_mean: float | None
    """Over kept samples at their gradient."""
    groups_dropped: int
    """Sealed groups that were dropped because they would have broken the bound at their gradient. A count: compare it
    with useful_groups. A visit whose samples of one class expired before it was sealed has no group to drop."""
    virtual_s: float
    """Length of the run, virtual seconds."""
    samples: int
    """Counted and wasted samples, and greedy responses."""
    wall_s: float
    """Real seconds of the run, its warm-up excluded; the one value that differs between equal runs."""
    visits: int
    """Visits of these prompts, those that the strategy gave no samples included; as many as prompts by default."""
    passed_over: int
    """Turns that the selector did not make a visit: visits + passed_over = prompts x sim.epochs."""
    visits_lost: int
    """Visits with a signal that made no group: at their budget's end no fresh sample of one class was left."""
    visits_failed: int
    """Visits whose prompt was given up since a request failed `worker.max_sample_failures` times. What they generated
    is in samples and tokens; they enter no mean and no rate."""
    launches: int
    """Requests of the whole run, those of the prompts that follow included: what `wall_s` was spent on. Not `samples`,
    which are those of the reported visits alone."""
    vacant_places: int
    """Places of steps that `learner.max_tokens_per_step` left without a group, over the whole run. Only in the text."""

    def as_json(self) -> dict[str, Value]:
        """The keys above, in this order."""
        return {key: value for key, value in asdict(self).items() if key not in _TEXT_ONLY}

    def as_text(self) -> str:
        """A few lines to read."""
        error = f" ± {self.samples_per_prompt_se:.4f}" if self.samples_per_prompt_se is not None else ""
        per_group = self.samples / self.useful_groups if self.useful_groups else math.nan
        lines = [
            f"{self.strategy}: {self.prompts} prompts, {self.visits} visits, {self.samples} samples in"
            f" {self.virtual_s:.1f} virtual s ({self.wall_s:.2f} s real for {self.launches} requests in all)",
            f"samples a visit     {self.samples_per_prompt_mean:.4f}{error}; solved {self.success_rate:.4f},"
            f" without signal {self.zero_signal_rate:.4f}",
            f"useful groups       {self.useful_groups}, each {per_group:.2f} samples and"
            f" {_number(self.tokens_per_useful_group, 0)} tokens; dropped {self.groups_dropped},"
            f" visits lost to expiry {self.visits_lost}",
            f"tokens wasted       {self.tokens_wasted} of {self.tokens_generated}",
            f"slots busy          {self.worker_busy_ratio:.4f}; learner idle {_number(self.learner_idle_ratio, 4)}",
            f"staleness           mean {_number(self.staleness_mean, 2)}, max {self.staleness_max}",
            f"kept lengths        right {_number(self.kept_length_ratio_right, 3)},"
            f" wrong {_number(self.kept_length_ratio_wrong, 3)} of their law's; pool mean bias"
            f" {_number(self.pool_mean_bias, 4)}",
        ]
        if self.visits_failed:
            lines.append(f"visits failed       {self.visits_failed}, in no mean")
        if self.vacant_places:
            lines.append(f"places left vacant  {self.vacant_places}")
        if self.passed_over:
            lines.append(f"passed over         {self.passed_over} turns")
        if self.implied_weight:
            weights = ", ".join(f"p = {rate}: {weight:.4f}" for rate, weight in self.implied_weight.items())
            lines.append(f"implied weight      {weights}")
        return "\n".join(lines) + "\n"


def make_report(strategy: str, books: Books, driver: Driver, laws: Laws, wall_s: float) -> Report:
    """The record of a run that has ended."""
    tokens = books.tokens_counted + books.tokens_wasted
    kept, visits = books.kept_right + books.kept_wrong, books.num_ended - books.num_failed
    return Report(
        strategy=strategy,
        prompts=laws.config.prompts,
        samples_per_prompt_mean=_ratio(books.counted, visits) or 0.0,
        samples_per_prompt_se=_standard_error(books),
        success_rate=_ratio(books.solved, visits) or 0.0,
        zero_signal_rate=_ratio(books.zero_signal, visits) or 0.0,
        kept_length_ratio_right=_ratio(books.kept_right_tokens, books.kept_right * laws.mean_tokens(is_right=True)),
        kept_length_ratio_wrong=_ratio(books.kept_wrong_tokens, books.kept_wrong * laws.mean_tokens(is_right=False)),
        pool_mean_bias=_ratio(books.bias_sum * UNIT, books.num_pools),
        implied_weight={
            f"{rate:g}": weigher.weight(rate)
            for rate, weigher in sorted(books.weighers.items())
            if weigher.num_visits and 0.0 < rate < 1.0
        },
        tokens_generated=tokens,
        tokens_wasted=books.tokens_wasted,
        useful_groups=books.useful_groups,
        tokens_per_useful_group=_ratio(tokens, books.useful_groups),
        worker_busy_ratio=driver.full.busy_ratio if driver.full else 0.0,
        learner_idle_ratio=driver.full.idle_ratio if driver.full else None,
        staleness_max=books.staleness_max,
        staleness_mean=_ratio(books.staleness_sum, kept),
        groups_dropped=books.dropped_groups,
        virtual_s=driver.now,
        samples=books.counted + books.counted_failed + books.greedy + books.wasted,
        wall_s=wall_s,
        visits=books.num_ended,
        passed_over=books.num_passed_over,
        visits_lost=books.lost_visits,
        visits_failed=books.num_failed,
        launches=driver.num_launched,
        vacant_places=books.vacant_places,
    )


def _standard_error(books: Books) -> float | None:
    count = books.num_ended - books.num_failed
    if count < 2:
        return None
    # Integers: no cancellation.
    spread = count * books.counted_squared - books.counted * books.counted
    return math.sqrt(spread / (count * count * (count - 1)))


def _ratio(value: float, base: float) -> float | None:
    return value / base if base else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
