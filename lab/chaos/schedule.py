"""Draws the faults of a run from a seed. The same seed results in the same faults at the same times."""

import random
from collections.abc import Mapping, Sequence

from attrs import field, frozen

SPACING_SECONDS = (1.0, 3.0)
REST_SECONDS = 2.0
"""The number of seconds after the end of a fault before the same worker, or any service, has the next fault."""


@frozen
class FaultKind:
    """A kind of fault.

    Attributes:
        what: The name of the fault.
        line: The proxy (line) of a worker that fails: "store", "goal" or "stream", or "" if the fault has none.
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
        description_parts = (
            self.kind.what,
            self.kind.line and f"to the {self.kind.line}",
            self.worker and f"of {self.worker}",
        )
        duration_text = f"for {self.seconds:.1f} s" if self.seconds else ""
        return " ".join(part for part in (*description_parts, duration_text) if part)


def draw_schedule(seed: int, seconds: float, kinds: Sequence[FaultKind], workers: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a run of this many seconds, in order.

    Every kind of fault occurs once before any kind occurs again. At any time, more than half of the workers have no
    fault, so that they can take over the shards of the others.
    """
    rng = random.Random(f"chaos of plain workers {seed}")  # noqa: S311  a seed is the point
    busy_until: dict[str, float] = {}
    faults: list[Fault] = []
    unused_kinds: list[FaultKind] = []
    start_seconds = 0.0
    while (start_seconds := start_seconds + rng.uniform(*SPACING_SECONDS)) < seconds:
        unused_kinds = unused_kinds or rng.sample(kinds, len(kinds))
        free_workers = [worker for worker in workers if busy_until.get(worker, 0.0) <= start_seconds]
        for kind in unused_kinds:
            fault = Fault(
                round(start_seconds, 1),
                kind,
                "" if kind.common or not free_workers else rng.choice(free_workers),
                round(rng.uniform(*kind.seconds), 1),
            )
            if _is_allowed(fault, busy_until, len(workers) - len(free_workers), len(workers)) and fault.until < seconds:
                faults.append(fault)
                unused_kinds.remove(kind)
                busy_until[fault.worker] = fault.until + REST_SECONDS
                break
    return tuple(faults)


def _is_allowed(fault: Fault, busy_until: Mapping[str, float], busy_workers: int, workers: int) -> bool:
    """Return whether the fault may occur: only one service at a time, or fewer than half of the workers, are faulty."""
    if fault.kind.common:
        return busy_until.get("", 0.0) <= fault.at
    return bool(fault.worker) and 2 * (busy_workers + 1) < workers
