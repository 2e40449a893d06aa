"""Where every generated token went.

Invariant: generated = trained + counted + aborted + failed + held, at every moment. `held` is the sum over what is
still open (samples of live arms and untrained groups), given by the caller: so the equation is a check, no definition.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenLedger:
    """Response tokens of training samples, by fate. Evaluation tokens are kept apart."""

    generated: int = 0
    trained: int = 0
    """In a gradient."""
    counted: int = 0
    """In an arm's statistics, but in no gradient; greedy responses too."""
    aborted: int = 0
    """Launched beyond the stopping sample, or left over at the end of the run."""
    failed: int = 0
    """Of samples that failed (worker or verifier)."""
    evaluated: int = 0
    """Held-out test; not part of `generated`."""

    def missing(self, held: int) -> int:
        """Tokens unaccounted for; 0 = the ledger closes."""
        return self.generated - self.trained - self.counted - self.aborted - self.failed - held
