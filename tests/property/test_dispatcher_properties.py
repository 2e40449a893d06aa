"""Whatever happens in whatever order, the dispatcher keeps its invariants."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.advantage import AdvantageRule
from engine.core.arm import Sample
from engine.core.dispatcher import Dispatcher
from engine.core.group import Group
from engine.core.policy import Policy
from engine.core.staleness import Bound
from engine.core.width import Pace
from engine.strategies import Balance, Fixed, Positives
from tests.support.event_driver import prompt

STRATEGIES = st.sampled_from([Balance(2, 2, 12, 4), Balance(1, 3, 9, 4), Positives(2, 8, 4), Fixed(5, 4)])
RULES = st.sampled_from(
    [
        AdvantageRule(),
        AdvantageRule(baseline="greedy"),
        AdvantageRule(baseline="zero", whiten=True),
        AdvantageRule(baseline="kept", whiten=True),
        AdvantageRule(baseline="greedy", whiten=True),
    ]
)
CHOICES = st.fixed_dictionaries(
    {
        "rule": RULES,
        "at_exit": st.sampled_from(["abort", "drain"]),
        "fixed_width": st.sampled_from([0, 0, 5]),
        "max_tokens_per_visit": st.sampled_from([1 << 62, 23]),
        "max_tokens_per_step": st.sampled_from([0, 1, 60]),
    }
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["launch", "launch", "launch", "score", "score", "score", "fail", "ship", "step", "publish"]),
        st.integers(0, 1_000_000),
    ),
    max_size=250,
)


class Machine:
    """Feeds random events and remembers what a correct dispatcher must have done."""

    def __init__(self, policy: Policy, pace: Pace) -> None:
        self.dispatcher = Dispatcher(policy, pace=pace)
        self.open: dict[tuple[int, int], tuple[int, int]] = {}
        self.shipped: list[Group] = []
        self.ended: set[int] = set()
        self.num_prompts = 0
        self.num_greedy = int(policy.rule.needs_greedy)

    def launch(self, _choice: int) -> None:
        launch = self.dispatcher.next_launch()
        if launch is None:
            if self.dispatcher.may_launch:
                self.dispatcher.admit(prompt(self.num_prompts))
                self.num_prompts += 1
            return
        key = (launch.arm.arm_id, launch.index)
        assert key not in self.open, "a launch under way was launched again"
        assert launch.index < self.dispatcher.policy.strategy.n_max + self.num_greedy
        assert launch.is_greedy == (launch.index < self.num_greedy)
        assert launch.arm.ending is None or launch.retry, "a draining arm asked for something new"
        self.open[key] = (launch.retry, self.dispatcher.generation_version)

    def pick(self, choice: int) -> tuple[int, int, int, int] | None:
        if not self.open:
            return None
        arm_id, index = sorted(self.open)[choice % len(self.open)]
        retry, version = self.open.pop((arm_id, index))
        return arm_id, index, retry, version

    def retire(self, retirement) -> None:
        if retirement is None:
            return
        arm = retirement.arm
        assert arm.arm_id not in self.ended, "an arm retired twice"
        self.ended.add(arm.arm_id)
        first = self.num_greedy
        assert [s.index for s in arm.counted] == list(range(first, first + len(arm.counted)))
        if self.dispatcher.policy.at_exit == "drain" and retirement.reason != "failed":
            assert first + len(arm.counted) == arm.num_launched, "an arm retired before all it launched counted"
        for key in [key for key in self.open if key[0] == arm.arm_id]:
            del self.open[key]

    def score(self, choice: int) -> None:
        picked = self.pick(choice)
        if picked is not None:
            arm_id, index, retry, version = picked
            assert self.dispatcher.is_open(arm_id, index, retry)
            is_right = choice % 3 == 0
            self.dispatcher.outbox.spend(5)
            self.retire(self.dispatcher.score(arm_id, Sample(index, float(is_right), is_right, version, 5, None)))

    def fail(self, choice: int) -> None:
        picked = self.pick(choice)
        if picked is not None:
            self.retire(self.dispatcher.fail(picked[0], picked[1]))

    def ship(self, _choice: int) -> None:
        found = self.dispatcher.outbox.next_group()
        if isinstance(found, tuple):
            group, trained_at = found
            bound = self.dispatcher.policy.bound.max_staleness
            assert all(trained_at - s.min_version <= bound for s in group.kept)
            assert trained_at >= self.dispatcher.outbox.learner_version
            assert group.group_id not in {g.group_id for g in self.shipped}
            assert not group.awaits_step
            assert all(s.index >= self.num_greedy for s in group.kept)
            assert len({s.index for s in group.kept}) == len(group.kept) <= self.dispatcher.policy.strategy.group_size
            self.shipped.append(group)
            batch = self.dispatcher.policy.bound.groups_per_step
            step = self.shipped[(len(self.shipped) - 1) // batch * batch :]
            assert step[0].kept, "a step began with a vacant place"

    def step(self, _choice: int) -> None:
        batch = self.dispatcher.policy.bound.groups_per_step
        if self.dispatcher.outbox.num_shipped >= batch:
            self.dispatcher.outbox.step_done(self.dispatcher.outbox.learner_version + 1, batch)

    def publish(self, _choice: int) -> None:
        self.dispatcher.generation_version = self.dispatcher.outbox.learner_version

    def check(self) -> None:
        for arm in self.dispatcher.arms.values():
            launched = len(arm.counted) + arm.num_pending + arm.num_failed_launches
            if self.num_greedy and (arm.greedy is not None or 0 in arm.in_flight):
                launched += 1
            assert launched == arm.num_launched <= self.dispatcher.policy.strategy.n_max + self.num_greedy
            assert arm.greedy is not None or not (self.num_greedy and arm.counted)


@settings(max_examples=300, deadline=None)
@given(
    strategy=STRATEGIES,
    events=EVENTS,
    max_staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    is_pressed=st.booleans(),
    choices=CHOICES,
)
def test_no_order_of_events_breaks_an_invariant(strategy, events, max_staleness, batch, is_pressed, choices) -> None:
    policy = Policy(strategy, Bound(max_staleness, batch), max_failures=3, **choices)
    machine = Machine(policy, Pace(10.0, 10.0) if is_pressed else Pace())
    for name, choice in events:
        getattr(machine, name)(choice)
        machine.check()
