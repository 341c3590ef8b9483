"""Dispatches the records of a worker to child processes, which use the protocol of the KCL's MultiLangDaemon.

One event loop in its own thread serves all children. The loop starts before the worker and ends after the worker, so
that a child still gets its last message after its lease was handed off, released or lost.

Rule 1: A child never misses records. If a child fails after records were sent to it, the next child starts at the
checkpoint and gets these records first. The messages for the start of a child and for empty reads are sent without
waiting for the response. If such a message fails, the next call for the lease raises its error, so that reading then
restarts at the checkpoint, too.
Rule 2: If a dead-letter sink is set and `attempts` children in a row have ended while processing a batch, we search for
the record that causes this. During the search, each failure restarts reading at the checkpoint. The suspected records
are then sent in two messages, so the next failure halves their number. Only the end of a child counts as a failure. If
a child cannot be started, no record is the cause. The record that is found is dead-lettered, and this process leaves it
out of messages until a checkpoint has passed it.
"""

import asyncio
import inspect
import logging
from asyncio import AbstractEventLoop
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self

from botocore.exceptions import ClientError

from leasehold.adapters.consumer.attempts import PositionKey
from leasehold.adapters.consumer.handling import DeadLetter, Delivery, FinalCheckpoint, Handling, ShardEvent
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.multilang.children import ChildFault, ChildNotStarted, ChildProcesses
from leasehold.adapters.multilang.protocol import CheckpointError
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Position
from leasehold.errors import OutcomeUnknown, SourceError, StoreError
from leasehold.stores.dynamodb.store import THROTTLING_CODES, error_code, is_table_missing
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.child"))

LEASE_LOST_SECONDS = 5.0
"""How long to wait, once the worker has drained, for children that have lost their leases. After that, their pipes are
closed."""

CLOSE_SECONDS = 30.0
"""How long to wait for `ChildProcesses.close`, which needs at most three times `EXIT_SECONDS` to end the children."""

SEARCH_ATTEMPTS = 40
"""The number of attempts for a search, enough to find two bad records in a message of maximum size."""


class RecordSearch:
    """Searches one shard's batches for the record that makes its child processes fail (rule 2)."""

    def __init__(self, attempts: int) -> None:
        self._max_attempts, self._fault_count = attempts, 0
        self._furthest_failure: PositionKey = (0, 0, 0)
        self._suspect_range: tuple[PositionKey, PositionKey] | None = None  # the first and the last position
        self._dead_lettered_keys = set[PositionKey]()

    def split_into_messages(self, records: Sequence[Record], checkpoint: PositionKey) -> list[Sequence[Record]]:
        """Split records into messages, in order, leaving out those that were dead-lettered."""
        self._dead_lettered_keys = {
            position_key for position_key in self._dead_lettered_keys if position_key > checkpoint
        }
        remaining_records = [record for record in records if record.position.order not in self._dead_lettered_keys]
        if self._suspect_range is None:
            return [remaining_records] if remaining_records else []
        first_suspect, last_suspect = self._suspect_range
        records_before = [record for record in remaining_records if record.position.order < first_suspect]
        suspect_records = [
            record for record in remaining_records if first_suspect <= record.position.order <= last_suspect
        ]
        records_after = [record for record in remaining_records if record.position.order > last_suspect]
        half_count = (len(suspect_records) + 1) // 2
        return [
            part
            for part in (records_before, suspect_records[:half_count], suspect_records[half_count:], records_after)
            if part
        ]

    def record_success(self, part: Sequence[Record]) -> None:
        """Record that the child has processed this part."""
        end_order = part[-1].position.order
        # A batch that is read again may begin with records that never failed, so a success counts only if it
        # includes the end of the suspect range, or the furthest failure.
        if self._suspect_range is not None and end_order >= self._suspect_range[1]:
            self._suspect_range = None
        if self._suspect_range is None and end_order >= self._furthest_failure:
            self._fault_count = 0

    def record_failure(self, part: Sequence[Record]) -> Record | None:
        """Record that the child ended while processing this part. Return the part's record if there is only one."""
        self._fault_count += 1
        self._furthest_failure = max(self._furthest_failure, part[-1].position.order)
        if self._suspect_range is None and self._fault_count < self._max_attempts:
            return None
        # At first, this is the whole message. Later, it is a part of the former range, which was split.
        self._suspect_range = part[0].position.order, part[-1].position.order
        return part[0] if len(part) == 1 else None

    def record_dead_letter(self, record: Record) -> None:
        """Record that this record was dead-lettered."""
        self._dead_lettered_keys.add(record.position.order)
        self._suspect_range, self._fault_count = None, 0


class ChildHandler:
    """Dispatches batches to children. Use it as a context manager around the worker.

    Args:
        children: The children.
        attempts: How many child processes in a row must fail on the same batch before we search for the bad record.
        dead_letter: Receives a record on which every child fails; None to release the shard to other workers.
        send_empty: Whether children also get messages for reads without records.
        strict: Whether the first fault of a child ends the worker, as in Java. The fault is then in `fault`.
    """

    def __init__(
        self,
        children: ChildProcesses,
        *,
        attempts: int = 5,
        dead_letter: DeadLetter | None = None,
        send_empty: bool = False,
        strict: bool = False,
    ) -> None:
        self._children, self._max_attempts, self._dead_letter = children, attempts, dead_letter
        self._send_empty, self._strict = send_empty, strict
        self.fault: Exception | None = None
        self._loop: AbstractEventLoop
        self._runner: Runner | None = None
        self._holdings: dict[str, Holding] = {}
        self._shard_end_checkpoints: dict[str, FinalCheckpoint] = {}
        # Keep a search when its lease is lost, because this worker may get the lease again, with the same bad record.
        self._searches: dict[str, RecordSearch] = {}
        self._pending_messages: dict[
            str, Future[None]
        ] = {}  # by lease key: messages whose response was not awaited yet
        self._lease_losses = set[Future[None]]()

    @property
    def handling(self) -> Handling:
        """The handling to pass to the worker."""
        attempts = self._max_attempts if self._dead_letter is None else self._max_attempts + SEARCH_ATTEMPTS
        return Handling(
            self._process_delivery,
            attempts=attempts,
            observer=self._on_shard_event,
            measure=self._report_empty_read,  # called after each read
            final_checkpoint=self._write_final_checkpoint,
        )

    def set_runner(self, runner: Runner) -> None:
        """Set the runner, which is stopped if a child fails and `strict` is set."""
        self._runner = runner

    def __enter__(self) -> Self:
        """Start the loop."""
        self._loop = asyncio.new_event_loop()
        self._thread = spawn(
            "leasehold-children", self._loop.run_forever, lambda fault: log.error("%s", error_summary(fault))
        )
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _fault: BaseException | None, _at: TracebackType | None
    ) -> None:
        """Wait for children that have lost their leases, and end all other children."""
        wait(tuple(self._lease_losses), LEASE_LOST_SECONDS)
        try:
            self._submit_to_loop(self._children.close()).result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            if not self._loop.is_running():
                self._loop.close()

    def _submit_to_loop(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # Events between two batches

    def _on_shard_event(self, event: ShardEvent, holding: Holding) -> None:
        key, shard = holding.key, holding.lease.shard
        if event == "initialize":
            self._holdings[key] = holding
            self._pending_messages[key] = self._submit_to_loop(
                self._children.start_child(shard, *self._checkpoint_and_writer(holding))
            )
            self._pending_messages[key].add_done_callback(self._check_message)
            return
        self._shard_end_checkpoints.pop(key, None)
        self._pending_messages.pop(key, None)
        # This also ends the child of a lease that was released. After the end of a shard, no child is left.
        lease_loss = self._submit_to_loop(self._children.lose_lease(shard))
        self._lease_losses.add(lease_loss)
        lease_loss.add_done_callback(self._lease_losses.discard)

    def _report_empty_read(self, holding: Holding, batch: Batch) -> None:
        """Tell the child that a read returned no records, unless its previous message is pending or has failed."""
        previous_message = self._pending_messages.get(holding.key)
        if not self._send_empty or batch.records:
            return
        if previous_message is not None and (
            not previous_message.done() or previous_message.cancelled() or previous_message.exception() is not None
        ):
            return
        checkpoint, write_checkpoint = self._checkpoint_and_writer(holding)
        message = self._children.process_batch(
            holding.lease.shard, checkpoint, (), batch.behind_seconds, write_checkpoint
        )
        self._pending_messages[holding.key] = self._submit_to_loop(message)
        self._pending_messages[holding.key].add_done_callback(self._check_message)

    def _checkpoint_and_writer(self, holding: Holding) -> tuple[Position, Any]:
        # Write checkpoints in another thread, so that the event loop can serve the other children meanwhile.
        return holding.lease.checkpoint, lambda position: asyncio.to_thread(self._store_checkpoint, holding, position)

    async def _await_message(self, key: str) -> None:
        """Wait for the response to a message that was sent without waiting. Raises the message's error (rule 1)."""
        if (message := self._pending_messages.pop(key, None)) is not None:
            await asyncio.wrap_future(message)

    def _check_message(self, message: "Future[None]") -> None:
        if not message.cancelled() and (fault := message.exception()) is not None:
            self._stop_if_strict(fault)

    def _stop_if_strict(self, fault: BaseException) -> None:
        """Stop the worker because of this fault, if `strict` is set."""
        if self._strict and self.fault is None and isinstance(fault, ChildFault | ChildNotStarted):
            log.error("the worker stops, because a child has failed: %s", error_summary(fault))
            self.fault = fault
            if self._runner is not None:
                self._runner.stop()

    # Batches, and the final checkpoint

    async def _process_delivery(self, delivery: Delivery) -> None:
        await self._await_message(delivery.lease)
        holding = self._holdings[delivery.lease]
        checkpoint, write_checkpoint = self._checkpoint_and_writer(holding)
        search = self._searches.setdefault(holding.key, RecordSearch(self._max_attempts))
        message_parts = (
            search.split_into_messages(delivery.records, checkpoint.order) if self._dead_letter else [delivery.records]
        )
        for part in message_parts:
            message = self._children.process_batch(
                delivery.shard, checkpoint, part, delivery.behind_seconds, write_checkpoint
            )
            try:
                await asyncio.wrap_future(self._submit_to_loop(message))
            except (ChildFault, ChildNotStarted) as fault:
                self._stop_if_strict(fault)
                # Do not search if the lease is lost. The child was then killed for that reason, and not because of a
                # record.
                if self._dead_letter is not None and isinstance(fault, ChildFault) and not holding.lost.is_set():
                    await self._search_for_record(search, part, delivery, fault, self._dead_letter)
                raise  # even if the record was dead-lettered: the batch is read again, and this record is left out
            search.record_success(part)

    async def _search_for_record(
        self,
        search: RecordSearch,
        part: Sequence[Record],
        delivery: Delivery,
        fault: ChildFault,
        dead_letter: DeadLetter,
    ) -> None:
        if (record := search.record_failure(part)) is None:
            return
        sink_result = await asyncio.to_thread(dead_letter, delivery.part([record]), fault)
        if inspect.isawaitable(sink_result):
            await sink_result
        search.record_dead_letter(record)
        log.warning(
            "shard %s: record %s.%s was dead-lettered, because it ends every child: %s",
            delivery.lease,
            record.sequence_number,
            record.sub_sequence_number,
            error_summary(fault),
        )

    async def _write_final_checkpoint(self, final_checkpoint: FinalCheckpoint) -> None:
        await self._await_message(final_checkpoint.lease)
        holding = self._holdings[final_checkpoint.lease]
        shard = holding.lease.shard
        try:
            if final_checkpoint.ended:
                self._shard_end_checkpoints[holding.key] = final_checkpoint
                await asyncio.wrap_future(
                    self._submit_to_loop(self._children.end_shard(shard, *self._checkpoint_and_writer(holding)))
                )
            else:
                await asyncio.wrap_future(self._submit_to_loop(self._children.request_shutdown(shard)))
        except (ChildFault, ChildNotStarted) as fault:
            self._stop_if_strict(fault)
            raise

    # Checkpoints

    def _store_checkpoint(self, holding: Holding, position: Position) -> CheckpointError | None:
        """Store a checkpoint that a child requests. Return None, or the name of the error for the child."""
        if holding.lost.is_set():
            return "ShutdownException"
        try:
            is_stored = (
                self._shard_end_checkpoints[holding.key].end() if position.ended else holding.checkpoint(position)
            )
        except OutcomeUnknown as fault:  # the checkpoint may be stored or the lease lost, so the child should retry
            log.warning("shard %s: the outcome of a checkpoint is unknown: %s", holding.key, fault)
            return "ThrottlingException"
        except (StoreError, SourceError) as fault:
            error_name = find_error_name(fault)
            log.warning("shard %s: a checkpoint was not stored: %s", holding.key, fault)
            return error_name
        return None if is_stored else "ShutdownException"


def find_error_name(fault: StoreError | SourceError) -> CheckpointError:
    """Return the name of the Java exception that children expect for this error of the store."""
    if isinstance(fault.__cause__, ClientError) and error_code(fault.__cause__) in THROTTLING_CODES:
        return "ThrottlingException"
    if isinstance(fault, StoreError) and is_table_missing(fault):
        return "InvalidStateException"
    return "KinesisClientLibDependencyException"
