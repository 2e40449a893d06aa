"""The prompts of a simulated run, turn by turn: the selector makes a turn a visit, or passes the prompt over.

Invariants: each of the `sim.prompts` prompts has `sim.epochs` turns, and visits + passed over = turns; a draw sees a
whole pool, except at the end of the turns, as in engine/prompt_feed.py. Other prompts, never drawn from, follow while
the books need them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from engine.core.arm import Prompt
from engine.core.dispatcher import Dispatcher
from engine.core.selectors import Candidate, Selection
from engine.simulation.books import Books
from engine.simulation.law import Laws


@dataclass(frozen=True, slots=True)
class Queue:
    """What the driver takes its prompts from."""

    laws: Laws
    selection: Selection
    dispatcher: Dispatcher
    """Knows the prompts' pasts and the policy version."""
    books: Books

    def __iter__(self) -> Iterator[Prompt]:
        """Prompts to visit, each when it is asked for."""
        prompts = self.laws.prompts()
        yield from self._visits(islice(prompts, self.books.num_turns))
        while not self._is_enough():
            yield next(prompts)

    def _is_enough(self) -> bool:
        """Whether no other prompt is needed; whitened groups wait for the rest of their step till they are taken."""
        return self.books.is_done if self.books.rule.whiten else self.books.has_enough

    def _visits(self, turns: Iterator[Prompt]) -> Iterator[Prompt]:
        selection, dispatcher, books = self.selection, self.dispatcher, self.books
        while True:
            pool = selection.pool(dispatcher.outbox.learner_version)
            if not pool:
                prompt = next(turns, None)
                if prompt is None:
                    return
                selection.visit(prompt.prompt_id)
                yield prompt
                continue
            among = list(islice(turns, pool))
            if not among:
                return
            chosen = selection.draw([self._candidate(prompt) for prompt in among], dispatcher.outbox.learner_version)
            books.num_passed_over = selection.num_passed_over
            if chosen is not None:
                yield among[chosen]

    def _candidate(self, prompt: Prompt) -> Candidate:
        past = self.dispatcher.history.past(prompt.prompt_id, self.dispatcher.generation_version)
        return Candidate(prompt.prompt_id, past)
