"""Reads all leases that one worker holds, and releases those that it cannot read.

The worker calls `LeaseReaders.begin` with each lease that it has taken. The method creates a `LeaseReader` and adds its
step to the `Schedule`.

1. If a lease is taken while the worker drains, its reader's first step releases it.
2. If the step of a reader raises several times in a row, the lease is released, because a lease must not be held
   without being read. If the lease is to be released anyway, one exception is enough. This worker does not take the
   lease again for a while.
"""

import logging
import math
import socket
from collections.abc import Callable
from functools import partial

from leasehold.adapters.consumer.acknowledging import acknowledging_reader
from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.executors import HandlerExecutor, ThreadExecutor
from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.consumer.schedule import STEP_FAULT_WAITS, Schedule, Step
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.worker import Worker
from leasehold.errors import StoreError
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.runner"))

MAX_FAULTS = len(STEP_FAULT_WAITS) + 1
"""If a step raises this many times in a row, its lease is released. The pauses between the attempts add up to ten
seconds."""

EXCLUDED_SECONDS = 60.0

StepFactory = Callable[[Worker, Holding, Handling], Step]
"""Makes the step for a lease that this worker has taken."""


class LeaseReaders:
    """Reads all leases that one worker holds, as its `HoldingConsumer`.

    Args:
        worker: The worker.
        handling: The handler and its policy.
        readers: How many shards may be read at the same time.
        memory_bytes: The maximum size of the records that are in memory and not handled yet, over all shards.
        make_step: Makes the step for a lease; by default that of a `LeaseReader`.
        executor: Calls the handlers; by default in threads.
        wall: The clock that determines the lag in the table's rows, in seconds since 1970. If None, rows contain no
            lag.
        on_failure: Called with an exception from which the worker cannot recover.
        end_worker: Called with the reason if the worker must end.

    Attributes:
        wants_leases: Whether the worker wants new leases. While it drains, the first step of a new lease releases it.
    """

    def __init__(
        self,
        worker: Worker,
        handling: Handling,
        *,
        readers: int,
        memory_bytes: int,
        make_step: StepFactory | None,
        executor: HandlerExecutor | None,
        wall: Callable[[], float] | None,
        on_failure: Callable[[BaseException], None],
        end_worker: Callable[[BaseException], None],
    ) -> None:
        self._worker, self._handling, self._make_step, self._wall, self._on_failure = (
            worker,
            handling,
            make_step,
            wall,
            on_failure,
        )
        self._scheduler, self.wants_leases = worker.scheduler, True
        self.schedule = Schedule(self._scheduler, readers, "leasehold-read", on_failure)
        self.schedule.start()
        self.memory = MemoryBudget(memory_bytes, self.schedule.wake)
        max_calls = handling.most_calls
        self.dispatcher = Dispatcher(
            executor
            or (
                ThreadExecutor(readers, on_failure=on_failure)
                if max_calls is None
                else ThreadExecutor(max_calls, max_calls, on_failure)
            ),
            wake=self.schedule.wake,
            end_worker=end_worker,
            fatal=self._scheduler.fatal,
        )

    def begin(self, holding: Holding) -> None:
        """Start reading this lease, which the worker has just taken.

        The shard is opened by the reader's first step rather than here, so that the task that writes claims does not
        have to wait for it.
        """
        try:
            if not self.wants_leases:
                # Still create a lease reader, whose first step releases the lease.
                holding.ask_release()
            if self._wall is not None and self._worker.store.capabilities.free_annotations:
                # Enable annotations only if they are free. In other stores, an annotation is a separate write, which
                # other workers would mistake for a renewal (C14).
                holding.progress.enable_annotations(socket.gethostname(), self._wall, self._scheduler.clock())
            if self._make_step is not None:
                step = self._make_step(self._worker, holding, self._handling)
            else:
                step = self._make_reader(holding).step
                holding.progress.expect_response(self._scheduler.clock())
            self.schedule.add(holding.key, step, partial(self._releasing_step_for, holding))
        except BaseException as fault:  # noqa: BLE001  otherwise, the lease would be held but not read
            self._on_failure(fault)

    def _make_reader(self, holding: Holding) -> LeaseReader:
        handling, memory, dispatcher = self._handling, self.memory, self.dispatcher
        if (open_consumer := handling.consumer) is None:
            return handler_reader(self._worker, holding, handling, memory, dispatcher)
        return acknowledging_reader(
            self._worker,
            holding,
            handling,
            open_consumer,
            memory=memory,
            dispatcher=dispatcher,
            wake=self.schedule.wake,
        )

    def release(self, holding: Holding) -> None:
        """Wake the reader of this lease, which is to be released or is lost."""
        if holding.progress.call_abandoned:
            self.schedule.abandon(holding.key)
        self.schedule.wake(holding.key)

    def release_all(self) -> None:
        """Finish the running batches and release all leases."""
        for holding in self._worker.holdings:
            holding.ask_release()
            self.schedule.wake(holding.key)

    def _releasing_step_for(self, holding: Holding, fault_count: int) -> Step | None:
        """Return a step that releases the lease, or None if the reader's step may be called again (rule 2)."""
        if fault_count < MAX_FAULTS and not holding.releasing and not holding.lost.is_set():
            return None

        def release_lease(_now: float) -> float:
            if holding.lost.is_set():
                return math.inf
            # Exclude the lease from this worker's claims before releasing it. Otherwise, this worker might take it back
            # immediately and fail again.
            self._worker.exclude(holding.key, EXCLUDED_SECONDS)
            holding.ask_release()
            try:
                is_released = holding.release()
            except StoreError as fault:
                due = self._scheduler.clock() + RETRY_SECONDS
                log.warning("lease %s cannot be read here and is not released yet: %s", holding.key, fault)
                return due
            # If `release` returned False, the next owner has withdrawn its request. Release the lease nevertheless at
            # the next attempt, because its shard cannot be read here.
            due = math.inf if is_released else self._scheduler.clock() + RETRY_SECONDS
            log.error("lease %s cannot be read here and is released", holding.key)
            return due

        return release_lease
