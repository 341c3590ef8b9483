"""The faults of a run, drawn from a seed: the same seed gives the same faults at the same seconds."""

import random
from collections.abc import Mapping, Sequence

from attrs import field, frozen

SPACING_SECONDS = (1.0, 3.0)
REST_SECONDS = 2.0
"""How long a worker, or the services, have no further fault after one."""


@frozen
class FaultKind:
    """A fault that a ground can cause.

    what     its name
    line     which line of a worker fails: "store", "stream", or "" if it is no line
    seconds  the shortest and longest duration; for a worker that is gone, until it is started again
    common   whether it hits a service, and so all workers
    """

    what: str
    line: str = ""
    seconds: tuple[float, float] = (4.0, 9.0)
    common: bool = False


@frozen(order=True)
class Fault:
    """One fault, `at` seconds after the beginning; `worker` is "" if it hits all of them."""

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

    Every kind comes once before one comes again. More than half of the workers are left alone at any time, so that they
    can take over what a fault takes from the others.
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
    """Return whether the fault leaves all other services, or more than half of the workers, without a fault."""
    if fault.kind.common:
        return busy.get("", 0.0) <= fault.at
    return bool(fault.worker) and 2 * (troubled + 1) < workers
