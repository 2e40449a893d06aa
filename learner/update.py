"""One update of the policy: from the groups of a version to its optimizer steps, whatever the backend.

Invariants:
- Every group is checked before it is packed, and no two groups of an update have one id.
- The update's first gradient, before any of its own steps, shows what sampler and learner compute differently: samples
  of another model are found there (with one mini-batch at the first groups that come in), and the mismatch that is
  reported is measured there.
- With `learner.mini_batches = 1` the gradient is computed while the groups come in. With k > 1 they are gathered,
  shuffled and split into k mini-batches of equal size (± 1 group), each one optimizer step. Unshuffled they would come
  in the order in which they were finished, easy prompts first, and the mini-batches would be a curriculum.
- The proximal policy of a decoupled loss is the one before the first mini-batch; with one mini-batch that is the policy
  itself, and costs no pass.
- A mini-batch without trained tokens takes no step: Adam would move weights on a zero gradient too (momentum, decay).
- One whose advantages are all 0 is a step like any other: entropy bonus and KL penalty still have a gradient, and
  without them momentum goes on. So it is in the paper's code.
- A gradient that is not finite moves nothing, is counted, and too many in a row end the run with the groups' names.

Called by the trainer, in its compute thread.
"""

import logging
import random
from collections.abc import Sequence
from statistics import fmean

from configs.root import Config
from engine.core.errors import RunError
from engine.wire import TrainGroup
from learner.backends.base import Backend, StepReport
from learner.gradient import Gradient
from learner.group_check import check_group
from learner.objectives import TokenSums

logger = logging.getLogger(__name__)


class PolicyUpdate:
    """Fills and takes the updates of one backend, one after another."""

    def __init__(self, backend: Backend, config: Config) -> None:
        self._backend = backend
        self._config = config
        self._gradient = Gradient()
        self._waiting: list[TrainGroup] = []  # at most learner.groups_per_step: one update's groups
        self._skipped: list[str] = []
        self._is_matched = False
        self._group_ids: set[int] = set()  # of the update being filled

    def add(self, groups: Sequence[TrainGroup]) -> None:
        """Take groups of the next update.

        Raises:
            RunError: a group cannot be trained (see `check_group`), two have one id, or the first logprobs are another
                model's.
        """
        for group in groups:
            if group.group_id in self._group_ids:
                raise RunError(f"every group of an update must have an id of its own, got {group.group_id} twice")
            self._group_ids.add(group.group_id)
            check_group(group, self._backend.vocabulary_size, self._config.learner.micro_batch_tokens)
        if self._config.learner.mini_batches == 1:
            part = self._backend.accumulate(groups)
            self._check_match(part)
            self._gradient += part
        else:
            self._waiting += groups

    def take(self, policy_version: int) -> dict[str, float]:
        """Take the optimizer steps of the update that starts from `policy_version`.

        Returns:
            Metrics of `StepDone`: means over all tokens trained, mean `grad_norm` and last `lr` of the steps taken
            (absent where there was none), `skipped` (mini-batches without a step) and `not_finite` (those among them
            whose gradient was not).

        Raises:
            RunError: the first logprobs are another model's, or too many gradients in a row were not finite.
        """
        self._group_ids.clear()
        if self._config.learner.mini_batches == 1:
            gradient, self._gradient = self._gradient, Gradient()
            return self._metrics([(gradient, self._step(gradient, policy_version))])
        groups, self._waiting = self._waiting, []
        steps: list[tuple[Gradient, StepReport | None]] = []
        loss = self._config.loss
        proximal = None
        if loss.objective == "decoupled" and loss.proximal == "recompute":
            proximal = self._backend.response_logprobs(groups)
        for part in mini_batches(groups, self._config.learner.mini_batches, (self._config.run.seed, policy_version)):
            gradient = self._backend.accumulate(part, proximal)
            if not steps:
                self._check_match(gradient)
            steps.append((gradient, self._step(gradient, policy_version)))
        return self._metrics(steps)

    def _step(self, gradient: Gradient, policy_version: int) -> StepReport | None:
        """One optimizer step, None without trained tokens."""
        if not gradient.sums.tokens:
            return None
        report = self._backend.optimizer_step(gradient.sums.normaliser)
        if report.is_skipped:
            self._count_skipped(gradient, policy_version)
        else:
            self._skipped.clear()
        return report

    def _check_match(self, gradient: Gradient) -> None:
        """At the first tokens of the learner's own version: are the behaviour logprobs this model's?"""
        fresh = {key: report for key, report in gradient.groups.items() if report.is_finite and report.own_tokens}
        if self._is_matched or not fresh:
            return
        self._is_matched = True
        mean = sum(report.mismatch for report in fresh.values()) / sum(report.own_tokens for report in fresh.values())
        limit = self._config.learner.max_first_mismatch_nats
        if mean > limit:
            worst = max(fresh, key=lambda key: fresh[key].mismatch / fresh[key].own_tokens)
            raise RunError(
                "behaviour logprobs of the learner's own version must be within "
                f"learner.max_first_mismatch_nats = {limit:g} of the learner's on average, they differ by {mean:.3g} "
                f"nats (group {worst}: {fresh[worst].mismatch / fresh[worst].own_tokens:.3g}): the samples come from "
                "another model, tokenizer or vocabulary"
            )

    def _count_skipped(self, gradient: Gradient, policy_version: int) -> None:
        guilty = [group_id for group_id, report in gradient.groups.items() if not report.is_finite]
        why = "their logprobs are not finite" if guilty else "each alone is finite: all of the step"
        named = ", ".join(map(str, sorted(guilty or gradient.groups)))
        self._skipped.append(f"from version {policy_version}: groups {named} ({why})")
        logger.warning("optimizer step skipped, its gradient is not finite; %s", self._skipped[-1])
        if len(self._skipped) >= self._config.learner.max_skipped_steps:
            raise RunError(
                f"{len(self._skipped)} optimizer steps in a row had no finite gradient (learner.max_skipped_steps = "
                f"{self._config.learner.max_skipped_steps}): " + "; ".join(self._skipped)
            )

    def _metrics(self, steps: Sequence[tuple[Gradient, StepReport | None]]) -> dict[str, float]:
        taken = [(gradient, report) for gradient, report in steps if report is not None and not report.is_skipped]
        metrics = {
            "tokens_trained": 0.0,
            "tokens_packed": float(sum(gradient.packed_tokens for gradient, _ in steps)),
            "skipped": float(len(steps) - len(taken)),
            "not_finite": float(sum(report is not None and report.is_skipped for _, report in steps)),
        }
        if not taken:
            return metrics  # Nothing was measured, so no means are sent.
        sums = sum((gradient.sums for gradient, _ in taken), TokenSums())
        norms = fmean(report.grad_norm for _, report in taken)
        # No step came before the first that was taken.
        mismatch = taken[0][0].sums.mismatch()
        return metrics | sums.means() | mismatch | {"grad_norm": norms, "lr": taken[-1][1].lr}


def mini_batches(groups: Sequence[TrainGroup], count: int, seed: tuple[int, int]) -> list[list[TrainGroup]]:
    """`count` random parts of `groups`, equal but for one group.

    Args:
        groups: In any order: the parts depend only on which they are.
        count: At least 1.
        seed: Of the run, and the policy version.
    """
    order = sorted(groups, key=lambda group: group.group_id)
    random.Random(f"mini-batches {seed[0]} {seed[1]}").shuffle(order)
    return [order[part::count] for part in range(count)]
