"""Reads the shard of one held lease, step by step, and passes its records to a consumer.

`Schedule` calls `LeaseReader.step` when it is due. The reader polls its consumer (`ConsumerPort.poll`) and gets its
next order from the state (`consumer/reader_state.py`). The usual orders are:

- Open and read the shard (`ShardReader`). The consumer keeps the batch that was read (`keep`).
- Deliver the batch. The consumer takes its records (`offer`), and moves the cursor's marks `delivered` and, once the
  records are processed, `acknowledged`.
- Store a checkpoint at the mark `acknowledged`. The consumer writes it (`store`).

1. A step reads at most once, and never waits for a consumer. It returns the time of the next call, or infinity once
   nothing is left to do.
2. If a step fails, the reader tries again after a wait or releases the lease, whatever the kind of consumer
   (`consumer/port.py` lists the kinds).

The package's docstring (`leasehold.adapters.consumer`) describes the order of events and why nothing is skipped.
"""

import logging
import math
from typing import assert_never

from leasehold.adapters.consumer.cursor import (
    AwaitEvent,
    CloseLostShard,
    DeliverRows,
    EndShard,
    OpenReader,
    ReadBatch,
    ReleaseAt,
    StoreCheckpoint,
)
from leasehold.adapters.consumer.handling import ShardEvent
from leasehold.adapters.consumer.lifecycle import ReadingStart, end_shard
from leasehold.adapters.consumer.port import (
    CloseShard,
    ConsumerPort,
    HeldShard,
    Ready,
    ReleaseAndCoolDown,
    RequestRelease,
    StepResult,
)
from leasehold.adapters.consumer.reader_state import BeginReading, ReaderOrder, RequestFinalCheckpoint
from leasehold.balancer.lineage import readable
from leasehold.errors import SourceError, SourceUnavailable, StoreError
from leasehold.stores.printable import make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.reading"))

RELEASED_CHECK_SECONDS = 0.2
"""The pause between two checks whether the lease is lost. If a call of the source does not return, the worker releases
the lease without waiting for the reader (D6). Once the call has returned, the reader waits until the release has been
written."""
EXPIRED_CHECK_SECONDS = 0.2
"""The pause between two checks whether an expired lease was renewed or dropped. A check sends no request to the
store."""


class LeaseReader:
    """Reads the shard of one held lease.

    Args:
        shard: The held shard.
        consumer: Takes the shard's records.
        cooldown_seconds: After this worker has failed to read the shard, it does not take the lease again for this many
            seconds.
    """

    def __init__(self, shard: HeldShard, consumer: ConsumerPort, cooldown_seconds: float) -> None:
        self.holding, self.consumer = shard.holding, consumer
        self._shard, self._worker, self._state = shard, shard.worker, shard.state
        self._reading_start = ReadingStart(shard.holding, shard.worker.source, shard.worker.config)
        self._cooldown_seconds = cooldown_seconds

    def step(self, now: float) -> float:
        """Do one bounded piece of work. Return when to call `step` again, or infinity if nothing is left to do."""
        try:
            due = self._poll_and_act(now)
        except (StoreError, SourceUnavailable) as fault:
            return self._pause_after_fault(fault, now, self._state.step_failed(now), "trying again")
        except SourceError as fault:
            retry_at = self._state.request_rejected(fault, now)
            if retry_at is not None:
                return self._pause_after_fault(fault, now, retry_at, "rejected, trying again")
            self.holding.progress.failed(str(fault), now)
            # Do not retry in this process. Another worker may have the permission or the network route that this one
            # lacks.
            return self._release_and_cool_down(f"it cannot be read: {fault}", now)
        self._state.step_done()
        return due

    def _poll_and_act(self, now: float) -> float:
        """Poll the consumer and carry out one order. Return the time of the next step."""
        holding, ready = self.holding, self.consumer.poll(now)
        if not isinstance(ready, Ready):
            due = self._carry_out_result(ready, now)
        elif holding.progress.call_abandoned and not holding.lost.is_set():
            due = now + RELEASED_CHECK_SECONDS
        else:
            next_order = self._state.next_order(
                now,
                holding.lease.checkpoint,
                lost=holding.lost.is_set(),
                releasing=holding.releasing,
                expired=holding.expired,
                can_deliver=ready.can_deliver,
                can_read=ready.can_read,
                awaits_commit=ready.awaits_commit,
            )
            due = self._carry_out(next_order, ready, now)
        self.consumer.step_ended(due)
        return due

    def _carry_out(self, order: ReaderOrder, ready: Ready, now: float) -> float:
        holding, worker, consumer = self.holding, self._worker, self.consumer
        match order:
            case OpenReader() | ReadBatch():
                return self._read(now)
            case DeliverRows():
                return self._carry_out_result(consumer.offer(now), now)
            case AwaitEvent():
                if ready.next_poll_seconds is not None:
                    return now + ready.next_poll_seconds
                # The worker soon renews or drops an expired lease. Until then, another worker might own it.
                return now + EXPIRED_CHECK_SECONDS if holding.expired else self._state.paused_until
            case StoreCheckpoint(checkpoint_position):
                # A checkpoint reads nothing, so this step may carry out another order.
                return (
                    self._poll_and_act(now)
                    if consumer.store(checkpoint_position, now)
                    else self._close_shard("lease-lost")
                )
            case BeginReading():
                return self._begin(now)
            case RequestFinalCheckpoint(ended):
                return self._carry_out_result(consumer.request_final_checkpoint(now, ended=ended), now)
            case ReleaseAt(release_position):
                # If the next owner has withdrawn its request, the lease stays here and reading continues immediately.
                return self._close_shard("stopped") if holding.release(release_position) else now
            case EndShard(children):
                if not end_shard(holding, children, worker, self._shard.cursor.acknowledged.token):
                    return self._close_shard("lease-lost")
                worker.hurry()  # so that a worker claims the children's new leases soon
                return self._close_shard("shard-ended")
            case CloseLostShard():
                return self._close_shard("lease-lost")
            case _ as never:
                assert_never(never)

    def _begin(self, now: float) -> float:
        """Open the shard at the position that the consumer chooses. If a parent shard is not done yet, wait instead."""
        lease = self.holding.lease
        parents = self._worker.parents(lease)
        # A partition key's earlier records are in the parent shard, so reading the child before the parent is done
        # would break their order (L12).
        if not readable(lease, parents):
            self.holding.progress.excused("its parents are not done", now)
            return now + self._state.parents_pending()
        self.holding.progress.call_began(now)
        start = self.consumer.find_start(lambda: self._reading_start.find(parents))
        if start is None:
            return self._close_shard("lease-lost")
        self.consumer.start_at(start, now)
        self.holding.progress.call_returned()
        return now

    def _read(self, now: float) -> float:
        consumer = self.consumer
        if (retry_at := consumer.reserve_memory(now)) is not None:
            return retry_at
        self.holding.progress.call_began(now)
        try:
            batch = self._shard.reader.read(consumer.keep)
        except BaseException:
            consumer.read_failed()
            raise
        return self._carry_out_result(consumer.batch_read(batch, now), now)

    def _carry_out_result(self, result: StepResult, now: float) -> float:
        """Carry out the result of one of the consumer's methods. Return the time of the next step."""
        match result:
            case float() | int():
                return result
            case ReleaseAndCoolDown(reason):
                return self._release_and_cool_down(reason, now)
            case RequestRelease():
                return self._release(now)
            case CloseShard(close_reason):
                return self._close_shard(close_reason)
            case _ as never:
                assert_never(never)

    # Faults and ends

    def _pause_after_fault(self, fault: Exception, now: float, due: float, next_action: str) -> float:
        self.consumer.step_failed()
        self.holding.progress.failed(str(fault), now)
        log.warning("shard %s: %s in %.1f s: %s", self.holding.key, next_action, due - now, fault)
        return due

    def _release_and_cool_down(self, reason: str, now: float) -> float:
        # Leave the lease to other workers for a while, because the fault may be in this worker's connections or disk.
        cooldown_seconds = self._cooldown_seconds
        # Exclude the lease from this worker's claims before releasing it. Otherwise, the worker's next turn might take
        # it back immediately.
        self._worker.exclude(self.holding.key, cooldown_seconds)
        self._worker.hurry()
        due = self._release(now)
        log.error(
            "shard %s stops here: %s; released, not taken again for %g s", self.holding.key, reason, cooldown_seconds
        )
        return due

    def _release(self, now: float) -> float:
        self.consumer.release_begun()
        self.holding.ask_release()
        return now

    def _close_shard(self, reason: ShardEvent) -> float:
        self.consumer.close_shard(reason)
        return math.inf
