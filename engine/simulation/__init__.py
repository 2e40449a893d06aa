"""The real dispatcher under a virtual clock: laws, driver, tally, report, sweep."""

from engine.simulation.driver import Driver, Speed
from engine.simulation.law import Laws, Visit
from engine.simulation.report import Report
from engine.simulation.run import simulate

__all__ = ["Driver", "Laws", "Report", "Speed", "Visit", "simulate"]
