"""`engine.plan`: a run's sizes from exact laws and short simulated runs."""

from engine.planning.propose import Plan, propose
from engine.planning.question import Question

__all__ = ["Plan", "Question", "propose"]
