"""The history of a simulated run, and beside it what the run cost the table."""

from collections import Counter

from attrs import define, field

from leasehold.adapters.history.events import RunHistory
from leasehold.adapters.proving.simulator.mishaps import CallEvent


@define
class SimulatedHistory(RunHistory):
    """A history, and the requests that it took.

    requests     by verb ("list" and "get" included): how many
    scanned      rows that listings read
    fetched      rows that were asked for by key, glimpsed those of them that might be stale
    calls        those of all processes, in the order in which they began, where everything is recorded
    """

    requests: Counter[str] = field(factory=Counter)
    scanned: int = 0
    fetched: int = 0
    glimpsed: int = 0
    calls: list[CallEvent] = field(factory=list)
