"""Lines (proxies) from one worker to one service, which fail while some condition lasts."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from attrs import Factory, define, field, frozen
from faulty_line import Fault, Late, Line, Refused, Reset, Silent, laid
from schedule import FaultKind

SLOW_SERVICE = "slow service"
"""A fault of streams only. If a table responded so slowly, the worker would rightly lose its leases."""
HTTP_FAULTS = ("late", "silent", "reset", "lost replies", "refused", "slow listings", "parted")
REQUESTS_ONLY, RESPONSES_ONLY, WRITES_UNANSWERED = ONE_WAY = "requests only", "responses only", "writes unanswered"
"""Faults in which a line carries only one direction. They last longer than a shard may wait for its worker."""
ONE_WAY_SECONDS = (30.0, 36.0)

SLOW_DOWN = (
    *(Refused("ProvisionedThroughputExceededException"), Refused("LimitExceededException")),
    *(Refused("InternalFailure", 500), Refused("ServiceUnavailable", 503)),
)
BUSY = Refused("ServerBusy", 503), Refused("InternalError", 500), Refused("SlowDown", 503)
WRITES = frozenset({"PutItem", "UpdateItem", "DeleteItem", "PUT", "POST", "PATCH", "DELETE"})
LISTINGS = frozenset({"Scan", "List", "ListShards", "BatchGetItem"})
FAULT_PROBABILITY = 0.5
"""The fraction of requests that fail under a condition, unless the condition affects all requests."""


def list_one_way_kinds(line: str, *, writes: bool = False) -> tuple[FaultKind, ...]:
    """Return the kinds of faults in which this line carries only one direction.

    Args:
        line: The name of the line.
        writes: Whether the line can distinguish writes from reads.
    """
    return tuple(
        FaultKind(fault_name, line, ONE_WAY_SECONDS)
        for fault_name in ONE_WAY
        if writes or fault_name != WRITES_UNANSWERED
    )


@define
class FaultyWorkerLine(Line):
    """Chooses a random fault for each request while a condition lasts.

    Attributes:
        seed: The seed of the random choices.
        refused: The error responses with which the service rejects requests.
        met: The number of requests that had a fault.
        conditions: The current conditions, from HTTP_FAULTS, ONE_WAY and SLOW_SERVICE.
    """

    seed: str = ""
    refused: tuple[Refused, ...] = SLOW_DOWN
    met: int = 0
    conditions: set[str] = Factory(set)
    _draw: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._draw = random.Random(self.seed)  # noqa: S311  a seed is the point

    def next(self, operation: str) -> Fault | None:
        fault = super().next(operation)
        for condition in sorted(self.conditions):
            fault = fault or self._random_fault(condition, operation)
        self.met += fault is not None
        return fault

    def _random_fault(self, condition: str, operation: str) -> Fault | None:
        if condition == "parted":
            return Reset()
        if condition == WRITES_UNANSWERED:
            return Reset(late=True) if operation in WRITES else None
        if condition in ONE_WAY:
            return Silent(20.0, late=condition == REQUESTS_ONLY)
        if condition == SLOW_SERVICE:
            return Late(self._draw.uniform(6.0, 25.0))
        if condition == "slow listings":
            return Late(3.0) if operation in LISTINGS else None
        faults: dict[str, Fault] = {
            "late": Late(self._draw.uniform(0.1, 1.5)),
            "silent": Silent(20.0),
            "reset": Reset(),
            "lost replies": Reset(late=True),
            "refused": self._draw.choice(self.refused),
        }
        return faults[condition] if self._draw.random() < FAULT_PROBABILITY else None


@frozen
class Lines:
    """The lines of all workers to one service, one line for each worker."""

    _lines: Mapping[str, FaultyWorkerLine]

    @classmethod
    @contextmanager
    def laid(cls, service_url: str, workers: Sequence[str], seed: str, refusals: tuple[Refused, ...]) -> Iterator[Self]:
        """Open the lines for the duration of the block."""
        with ExitStack() as stack:
            lines_by_worker = {
                worker: FaultyWorkerLine(service_url, seed=f"{seed} {worker}", refused=refusals) for worker in workers
            }
            for proxy in lines_by_worker.values():
                stack.enter_context(laid(proxy))
            yield cls(lines_by_worker)

    def url(self, worker: str) -> str:
        """Return the address at which this worker reaches the service."""
        return self._lines[worker].url

    def redirect(self, url: str) -> None:
        """Connect the lines to the service's new address."""
        for proxy in self._lines.values():
            proxy.to = url

    def begin(self, fault_name: str, worker: str) -> None:
        """Begin a condition on the line of this worker."""
        self._lines[worker].conditions.add(fault_name)

    def end(self, fault_name: str, worker: str) -> None:
        self._lines[worker].conditions.discard(fault_name)

    @property
    def met(self) -> int:
        """The number of requests that had a fault."""
        return sum(proxy.met for proxy in self._lines.values())
