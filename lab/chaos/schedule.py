"""Draws the faults of a run from a seed. The same seed results in the same faults at the same times."""

import random
from collections.abc import Mapping, Sequence

from attrs import field, frozen

SPACING_SECONDS = (1.0, 3.0)
REST_SECONDS = 2.0
"""The seconds after a fault in which the same worker, or the services, have no other fault."""


@frozen
class FaultKind:
    """A kind of fault.

    Attributes:
        what: The name of the fault.
        line: The line of a worker that fails ("store", "goal" or "stream"), or "" if the fault is not about a line.
        seconds: The shortest and the longest duration. A killed worker is restarted after this time.
        common: Whether the fault affects a service, and therefore all workers.
    """

    what: str
    line: str = ""
    seconds: tuple[float, float] = (4.0, 9.0)
    common: bool = False


@frozen(order=True)
class Fault:
    """A fault that starts `at` seconds after the start of the run. `worker` is "" if it affects all workers."""

    at: float
    kind: FaultKind = field(order=False)
    worker: str
    seconds: float

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        words = (self.kind.what, self.kind.line and f"to the {self.kind.line}", self.worker and f"of {self.worker}")
        lasting = f"for {self.seconds:.1f} s" if self.seconds else ""
        return " ".join(word for word in (*words, lasting) if word)


def schedule(seed: int, seconds: float, kinds: Sequence[FaultKind], workers: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a run of this many seconds, in order.

    Every kind of fault occurs once before any kind occurs again. At any time, more than half of the workers have no
    fault, so that they can take over the shards of the others.
    """
    draw = random.Random(f"chaos of plain workers {seed}")  # noqa: S311  a seed is the point
    busy: dict[str, float] = {}
    faults: list[Fault] = []
    left: list[FaultKind] = []
    at = 0.0
    while (at := at + draw.uniform(*SPACING_SECONDS)) < seconds:
        left = left or draw.sample(kinds, len(kinds))
        free = [worker for worker in workers if busy.get(worker, 0.0) <= at]
        for kind in left:
            fault = Fault(
                round(at, 1),
                kind,
                "" if kind.common or not free else draw.choice(free),
                round(draw.uniform(*kind.seconds), 1),
            )
            if _fits(fault, busy, len(workers) - len(free), len(workers)) and fault.until < seconds:
                faults.append(fault)
                left.remove(kind)
                busy[fault.worker] = fault.until + REST_SECONDS
                break
    return tuple(faults)


def _fits(fault: Fault, busy: Mapping[str, float], troubled: int, workers: int) -> bool:
    """Return whether the fault would be the only one of a service, or spare more than half of the workers."""
    if fault.kind.common:
        return busy.get("", 0.0) <= fault.at
    return bool(fault.worker) and 2 * (troubled + 1) < workers
