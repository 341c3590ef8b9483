"""Releases a lease whose reading raises an unforeseen fault: a lease must not be held and not read.

A step that raises is called again. When it has raised a few times in a row, or while its lease is to be left,
its lease is released, and not taken again by this worker for a while.
"""

import logging
import math
from collections.abc import Callable

from leasehold.adapters.reading.appointments import FAULT_SECONDS, Step
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.scheduler import Scheduler
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import StoreError

log = escaped(logging.getLogger("leasehold.runner"))

FAULTS_MOST = 3
"""A step may raise so often in a row: with the waits in between its lease is released within 15 seconds."""

RETRY_SECONDS = 1.0
EXCLUDED_SECONDS = 60.0


class Guarded:
    """A step that releases its lease when it cannot go on.

    step       the step itself
    exclude    keeps this worker from taking a lease for so many seconds
    scheduler  is told of every fault
    """

    def __init__(
        self, step: Step, holding: Holding, exclude: Callable[[str, float], None], scheduler: Scheduler
    ) -> None:
        self._step, self._holding, self._exclude, self._scheduler = step, holding, exclude, scheduler
        self._faults = 0

    def __call__(self, now: float) -> float:
        """Do one step."""
        if self._faults >= FAULTS_MOST:
            return self._let_go()
        try:
            due = self._step(now)
        except BaseException as fault:  # noqa: BLE001  whatever it is, the lease must not stay unread
            return self._failed(fault)
        self._faults = 0
        return due

    def _failed(self, fault: BaseException) -> float:
        self._scheduler.unforeseen(self._holding.key, fault)
        self._faults = FAULTS_MOST if self._holding.parting else self._faults + 1
        if self._faults < FAULTS_MOST and not self._holding.lost.is_set():
            return self._scheduler.clock() + FAULT_SECONDS
        return self._let_go()

    def _let_go(self) -> float:
        if self._holding.lost.is_set():
            return math.inf
        self._exclude(self._holding.key, EXCLUDED_SECONDS)
        self._holding.ask_release()
        try:
            released = self._holding.part()
        except StoreError as fault:
            log.warning("lease %s cannot be read here and is not released yet: %s", self._holding.key, fault)
            return self._scheduler.clock() + RETRY_SECONDS
        log.error("lease %s cannot be read here and is released", self._holding.key)
        return math.inf if released else self._scheduler.clock() + RETRY_SECONDS
