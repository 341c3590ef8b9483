"""Simulates one process of the fleet by running the real worker and runner under virtual time, with faults."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from attrs import evolve

from leasehold.adapters.consumer.handling import Delivery, FinalCheckpoint, Handling, ShardEvent
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consumer.schedule import Step
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.worker.handoffs import ParallelMap
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.scheduler import Unread
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.actions import Look
from leasehold.balancer.lookout import seconds_until_late_owners_expire
from leasehold.balancer.watch import Watch
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, WorkerError
from leasehold.stores.printable import error_summary
from leasehold.stores.protocol import Store
from leasehold_lab.judge.events import Incident, IncidentKind, ReadingEvent
from leasehold_lab.simulator.call_faults import CallableKind, is_poisonous
from leasehold_lab.simulator.scenario import Member
from leasehold_lab.simulator.world.client import CallExchange, StreamClient, TableClient
from leasehold_lab.simulator.world.layouts import SessionClient, SwapClient
from leasehold_lab.simulator.world.tasks import TaskKilled, VirtualExecutor, VirtualTime
from leasehold_lab.simulator.world.world import FIRST_MS, World


class ScanPerCycleWorker(Worker):
    """A worker that lists the whole table once per cycle and writes no bulletins.

    The worker still reads single leases that it has requested. It lists the table before its next cycle only to find
    out whether an owner has died (C16).
    """

    _full_read_due = -math.inf

    def _look_and_act(self, now: float, keys: tuple[str, ...] | None, parallel_map: ParallelMap) -> None:
        if not self._turns:
            self.table.watch = Watch()
        super()._look_and_act(now, keys, parallel_map)
        if keys is None:
            leases = (sighting.lease for sighting in self.table.watch.sightings.values())
            self._full_read_due = now + min(
                self.config.cycle_seconds, seconds_until_late_owners_expire(leases, self._current_me(), self.config)
            )
        if self._look.keys is None:
            self._look = evolve(self._look, seconds=max(self._look.seconds, self._full_read_due - now))


class PresentWorker(Worker):
    """A worker that was running before the run began. It has read the table, and starts by reading its own rows."""

    def start_with_watch(self, watch: Watch) -> None:
        """Start with `watch`, which contains the result of a read of the table."""
        self.table.watch = watch
        self._look = Look(0.0, keys=tuple(lease.key for lease in watch.whole.by_owner.get(self.me, ())))


RESTART_SECONDS = 1.0

UNACKNOWLEDGED_RECORDS = 3
"""How many records remain unacknowledged if the handler acknowledges late."""

ACKNOWLEDGE_PROBABILITY, END_SHARD_PROBABILITY = 0.3, 0.5
"""The probabilities that a handler that acknowledges at random does so after a batch, and at the end of a shard."""

LONG_SECONDS = 1e9


class Process:
    """A running process of a member of the fleet. All its tasks stop when it ends.

    `number` is unique among the processes of a run.
    """

    def __init__(self, member: Member, number: int, world: World) -> None:
        self.member, self.worker_id, self.process_id = member, member.worker, f"{member.worker}#{number}"
        self.foreign = member.foreign
        self._world, self._tasks, self._scenario = world, world.tasks, world.scenario
        self._draw = random.Random(f"{self._scenario.seed} {self.process_id}")  # noqa: S311  seeded, so that the run can be repeated
        self._dead = False
        self._paused_until = 0.0
        self._holdings: dict[str, Holding] = {}
        self._unacknowledged: dict[str, list[Delivery]] = {}  # Keyed by shard. Each delivery has one record.
        clock_offset = 0.0 if member.present else self._draw.uniform(0.0, 1000.0)
        self._time = VirtualTime(world.tasks, self, clock_offset, member.rate, self._draw, self.process_id)
        self._exchange = exchange = CallExchange(world, self)
        worker_class = (
            ScanPerCycleWorker if self._scenario.scan_per_cycle else PresentWorker if member.present else Worker
        )
        client = TableClient(world, self, exchange, self._draw)
        store: Store = client
        if self._scenario.swaps:
            second_client = TableClient(world, self, exchange, self._draw, world.goal)
            store = SwapClient(world, self, client, second_client, self._time)
        elif self._scenario.sessions:
            store = SessionClient(world, self, client, self._time)
        worker = worker_class(
            store=store,
            source=StreamClient(world, self, exchange, self._time),
            me=member.worker,
            config=member.config,
            scheduler=self._time,
            if_recreated=self._scenario.if_recreated,
        )
        if isinstance(worker, PresentWorker):
            worker.start_with_watch(world.create_first_watch(member.config, store.capabilities))
        checkpoints = self._scenario.checkpoints
        self._callable_faults = tuple(
            callable_fault
            for callable_fault in self._scenario.callable_faults
            if callable_fault.worker == member.worker
        )
        # Typed as Any, because a user's function may return anything.
        observer: Any = self._observe_event
        has_poison = any(callable_fault.what == "poison" for callable_fault in self._callable_faults)
        handling = Handling(
            self._handle_delivery,
            most_wait_seconds=2.0,
            attempts=2 if has_poison else 1000,
            dead_letter=self._dead_letter if has_poison else None,
            cooldown_seconds=self._scenario.bench_seconds,
            checkpoint_seconds=checkpoints,
            observer=observer,
            measure=self._measure_read,
            final_checkpoint=None if self._scenario.acknowledges == "return" else self._final_checkpoint,
        )
        begin_step = None if self._scenario.reading else _create_holding_step
        self._runner = Runner(
            worker,
            handling,
            begin=begin_step,
            executor=VirtualExecutor(self._time),
            wall=self._read_wall_clock if any(member.deaf for member in self._scenario.members) else None,
            drain_seconds=member.drain_seconds,
        )

    def run(self) -> None:
        """Run the worker until the process ends. The member determines when the process pauses and how it ends."""
        self._record_incident("start")
        for pause in self.member.naps:
            if pause.at >= self._tasks.now:
                self._tasks.start(partial(self._pause_tasks, pause.seconds), pause.at)
        if self.member.phase:
            self._tasks.start(self._runner.worker.hurry, self._tasks.now + self.member.phase)
        if self.member.plans < self.member.ends:
            self._tasks.start(lambda: self._record_incident("zombie"), self.member.plans)
        if self.member.ends < math.inf:
            end_process = partial(self.die, again=False) if self.member.ending == "crash" else self._begin_drain
            self._tasks.start(end_process, self.member.ends)
        is_restarting = False
        try:
            self._runner.run()
        except (WorkerError, StoreError, SourceError):
            self.die(again=True)  # as if a supervisor had restarted the process
            return
        except (SystemExit, KeyboardInterrupt):  # a handler raised this to end the worker
            is_restarting = True
        self._dead = True
        self._record_incident("gone")
        if is_restarting:
            self._restart()

    def wait(self, seconds: float) -> None:
        """Wait for this many seconds of virtual time, or until the end of the run if the process dies meanwhile."""
        self._tasks.sleep(seconds)
        self.wait_while_paused()

    def wait_if_deaf(self, shard: str) -> None:
        """If requests about this shard get no response now, wait for the timeout and raise SourceUnavailable."""
        if self.member.deaf_to and shard not in self.member.deaf_to:
            return
        if any(period.at <= self._tasks.now < period.at + period.seconds for period in self.member.deaf):
            self.wait(self.member.gives_up_seconds)
            raise SourceUnavailable("the stream does not respond")

    def wait_while_paused(self) -> None:
        """Block while the process is paused, or until the end of the run if it is dead."""
        while self._tasks.now < self._paused_until and not self._dead:
            self._tasks.sleep_until(self._paused_until)
        while self._dead:
            self._tasks.sleep_until(math.inf)

    def task_starts(self, name: str) -> None:
        """Record that a task starts. Faults can be injected into the start of a task as into any call."""
        try:
            self._exchange.make_call(f"task.{name}", lambda: None)
        except MemoryError as exc:
            raise RuntimeError("can't start new thread: there is no memory for it") from exc

    def idle(self) -> None:
        """Block if the process is paused. The scheduler calls this between two turns, when no lock is held.

        After the time at which the process stops planning, its turns block until the end of the run.
        """
        self.wait_while_paused()
        is_turn_task = self._tasks.current is self._time.named.get("leasehold-turn")
        while is_turn_task and self._tasks.now >= self.member.plans:
            self._tasks.sleep_until(math.inf)

    def pause(self, seconds: float) -> None:
        """Pause all tasks of the process for this many seconds."""
        self._pause_tasks(seconds)
        self.wait_while_paused()

    def die(self, *, again: bool) -> None:
        """Kill the process without further writes, and start it again later if `again` is true."""
        if self._dead:
            return
        self._dead = True
        self._record_incident("crash")
        if again:
            self._restart()

    def log_unexpected(self, task_name: str, fault: BaseException) -> None:
        """Record an exception that no code handles."""
        if isinstance(fault, TaskKilled):
            return  # the run is over
        self._world.history.faults.append(
            f"{self.process_id} at {self._tasks.now:.3f} s, {task_name}: {error_summary(fault)}"
        )

    def _read_wall_clock(self) -> float:
        """Return the time of day, which is the same for all processes."""
        return FIRST_MS / 1000 + self._tasks.now

    # Faults

    def _pause_tasks(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._tasks.now + seconds)
        self._record_incident("nap", seconds)

    def _restart(self) -> None:
        self._world.join(evolve(self.member, starts=self._tasks.now + RESTART_SECONDS))

    def _begin_drain(self) -> None:
        self.wait_while_paused()
        self._record_incident("leave")
        self._runner.stop()

    # Functions that stand for those of the user

    def _handle_delivery(self, delivery: Delivery) -> Any:  # noqa: ANN401  a user's function may return anything
        def call_handler() -> object:
            self._record_deliveries("record", delivery)
            if self._scenario.handling_seconds:
                self.wait(self._scenario.handling_seconds)
            handler_result = self._apply_callable_fault("handler", delivery)
            if handler_result is None and self._scenario.handler is not None:
                handler_result = self._scenario.handler(delivery)
            return handler_result

        with self._forget_on_failure(delivery.shard):
            result = self._exchange.call_user_function("handler", call_handler)
        if result is not None:
            return result
        if self._scenario.acknowledges == "return":
            self._record_deliveries("finished", delivery)
            return None
        # If a record is dispatched again after a fault, remove its earlier entry, so that it is not listed twice.
        first_order, pending_deliveries = (
            delivery.records[0].position.order,
            self._unacknowledged.setdefault(delivery.shard, []),
        )
        pending_deliveries[:] = [
            pending_delivery
            for pending_delivery in pending_deliveries
            if pending_delivery.records[0].position.order < first_order
        ]
        pending_deliveries += [delivery.part([record]) for record in delivery.records]
        self._acknowledge(delivery.shard, self._count_to_acknowledge(len(pending_deliveries)))
        return None

    @contextmanager
    def _forget_on_failure(self, shard: str) -> Iterator[None]:
        """Forget the shard's unacknowledged records if the handler fails.

        The simulated handler represents a child process. A replacement child doesn't know which records its predecessor
        received.
        """
        try:
            yield
        except BaseException:
            self._unacknowledged.pop(shard, None)
            raise

    def _final_checkpoint(self, final_checkpoint: FinalCheckpoint) -> Any:  # noqa: ANN401  a user's function may return anything
        shard = final_checkpoint.lease

        def end_shard() -> None:
            waiting_count = len(self._unacknowledged.get(shard, ()))
            if not final_checkpoint.ended:
                self._acknowledge(
                    shard,
                    waiting_count
                    if self._scenario.acknowledges == "late"
                    else self._count_to_acknowledge(waiting_count),
                )
            elif (
                self._scenario.acknowledges != "random"
                or self._tasks.now > self._scenario.calm
                or self._draw.random() < END_SHARD_PROBABILITY
            ):
                for delivery in self._unacknowledged.pop(shard, ()):
                    self._record_deliveries("acknowledged", delivery)
                final_checkpoint.end()

        with self._forget_on_failure(shard):
            return self._exchange.call_user_function("final checkpoint", end_shard)

    def _count_to_acknowledge(self, waiting_count: int) -> int:
        """Return how many of the unacknowledged records to acknowledge now."""
        match self._scenario.acknowledges:
            case "late":
                return max(0, waiting_count - UNACKNOWLEDGED_RECORDS)
            case "random":
                return self._draw.randint(0, waiting_count) if self._draw.random() < ACKNOWLEDGE_PROBABILITY else 0
            case _:
                return 0

    def _acknowledge(self, shard: str, count: int) -> None:
        """Acknowledge the first `count` unacknowledged records of the shard, by a checkpoint.

        The events are recorded before the checkpoint is written, because a write without a response may take effect.
        """
        acknowledged_records = self._unacknowledged.get(shard, [])[:count]
        for delivery in acknowledged_records:
            self._record_deliveries("acknowledged", delivery)
        try:
            if not acknowledged_records or not self._holdings[shard].checkpoint(
                acknowledged_records[-1].records[-1].position
            ):
                return
        except OutcomeUnknown:
            return  # the next checkpoint includes these records
        del self._unacknowledged[shard][:count]
        for delivery in acknowledged_records:
            self._record_deliveries("finished", delivery)

    def _dead_letter(self, delivery: Delivery, _error: Exception) -> Any:  # noqa: ANN401  a user's function may return anything
        result = self._exchange.call_user_function("dead letter", lambda: self._apply_callable_fault("dead letter"))
        if result is None:
            self._record_deliveries("dead-lettered", delivery)
        return result

    def _observe_event(self, event: ShardEvent, holding: Holding) -> object:
        self._record_event(event, holding.lease.shard)
        if event == "initialize":
            self._holdings[holding.lease.shard] = holding
            self._unacknowledged.pop(holding.lease.shard, None)
        return self._exchange.call_user_function("observer", lambda: self._apply_callable_fault("observer"))

    def _apply_callable_fault(self, whose: CallableKind, delivery: Delivery | None = None) -> object:
        now = self._tasks.now
        is_poisoned = delivery is None or any(is_poisonous(record.sequence_number) for record in delivery.records)
        matching_faults = (
            fault for fault in self._callable_faults if fault.whose == whose and (is_poisoned or fault.what != "poison")
        )
        fault = next(
            (fault for fault in matching_faults if fault.at <= now < fault.at + fault.seconds),
            None,
        )
        return None if fault is None else fault.apply(now, self.wait)

    def _measure_read(self, holding: Holding, batch: Batch) -> Any:  # noqa: ANN401  a user's function may return anything
        if batch.records or batch.behind_seconds is not None:  # otherwise the read got no response
            self._record_event("read", holding.lease.shard)
        return self._exchange.call_user_function("measure", lambda: self._apply_callable_fault("measure"))

    def _record_deliveries(self, event: str, delivery: Delivery) -> None:
        """Record an event for each record of the delivery.

        The events use the shard as the partition key, so the judge checks the order of records within each shard.
        """
        for record in delivery.records:
            number, shard = record.sequence_number, delivery.shard
            self._record_event(event, shard, (int(number), 0), shard, number, delivery.epoch)

    def _record_event(self, event: str, shard: str, *record: Any) -> None:  # noqa: ANN401  parts of a record
        if self._scenario.full:
            self._world.history.events.append(ReadingEvent(self._tasks.now, self.process_id, event, shard, *record))

    def _record_incident(self, kind: IncidentKind, seconds: float = 0.0) -> None:
        self._world.history.incidents.append(Incident(self._tasks.now, kind, self.process_id, seconds))


def _create_holding_step(_worker: Worker, holding: Holding, _handling: Handling) -> Step:
    """Return the step function of a lease whose shard is not read.

    The step releases the lease when its release is requested.
    """

    def step(now: float) -> float:
        if holding.releasing and not holding.lost.is_set():
            Unread().release(holding)
        return math.inf if holding.lost.is_set() else now + LONG_SECONDS

    return step
