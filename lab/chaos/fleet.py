"""Runs the worker processes of a chaos run, and causes and ends each kind of fault."""

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import patch

from attrs import define, evolve, field, frozen
from grounds import ANEW, PAUSES_DURING_RESHARD, WATCHER, Ground
from libc import STEP_SECONDS, FaultyLibc
from processes import ResourceLimit, ThreadLimit, list_processes_with_setting
from raising_log import ORDER
from schedule import Fault, FaultKind
from services import ServiceControl, Table, open_driver_store
from swap_command import COMMAND, SwapOperator
from unruly import DEEDS
from unsteady_line import HTTP_FAULTS, ONE_WAY, Lines, list_one_way_kinds
from wired import LOST_RESPONSES, WIRE_FAULTS, SharedWire
from written import parse_answer

from leasehold.adapters.multilang.children import EXIT_SECONDS
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.protocol import Lost
from leasehold.stores.swap import CONTROL_KEY, is_marked
from leasehold.stores.writes import DeleteLease
from leasehold_lab.demo.child import Child
from leasehold_lab.demo.stage import TICK_SECONDS, Stage, Tail
from leasehold_lab.judge.events import Incident, IncidentKind, WriteAnswer, parse_event
from leasehold_lab.judge.run import OPERATOR

LEASE_SECONDS, CYCLE_SECONDS, DRAIN_SECONDS = 6.0, 2.0, 12.0
SETTINGS = (
    *("--lease-seconds", f"{LEASE_SECONDS:g}", "--set", f"cycle_seconds={CYCLE_SECONDS:g}"),
    *("--initial-position", "LATEST", "--drain-seconds", f"{DRAIN_SECONDS:g}"),
    *("--attempts", "3", "--if-recreated", "TRIM_HORIZON", "--verbose"),
)
MISBEHAVING, DAEMON, CHILD = (
    str(Path(__file__).with_name(f"{name}.py")) for name in ("misbehaving", "unruly_daemon", "unruly_child")
)
PAUSE = FaultKind("pause", "store", (3.0, 8.0), common=True)
RESTART = FaultKind("restart", "store", (0.0, 0.0), common=True)
EMPTY_TABLE = FaultKind("table anew", "store", (0.0, 0.0), common=True)
DISK_FULL = FaultKind("disk full", seconds=(3.0, 8.0), common=True)
HELD = FaultKind("file locked", seconds=(3.0, 8.0), common=True)
READ_ONLY = FaultKind("disk read-only", seconds=(3.0, 8.0), common=True)
NO_THREADS = FaultKind("no more threads")
NO_DESCRIPTORS = FaultKind("no more descriptors")
NO_MEMORY = FaultKind("no more memory")
DENIALS = frozenset({DISK_FULL, READ_ONLY, NO_THREADS, NO_MEMORY})
STEPS = {"clock forward": STEP_SECONDS, "clock back": -STEP_SECONDS}
CLOCK_FAULTS = tuple(FaultKind(what, seconds=(2 * LEASE_SECONDS, 3 * LEASE_SECONDS)) for what in STEPS)
LOG_RAISES = FaultKind(ORDER, seconds=(6.0, 10.0))
UNNOTICED_FAULTS = frozenset({"kill", "end", "split", "merge", *STEPS})
"""Faults that explain no delays or repetitions.

Some of them are recorded as incidents of another kind, and workers should not notice the rest. Only services that check
times notice a stepped clock, because their tokens and signatures are valid for an hour at most.
"""
WORKER_FAULTS = (
    *(FaultKind("kill", seconds=(1.0, 9.0)), FaultKind("end", seconds=(0.0, 0.0))),
    FaultKind("stand still", seconds=(LEASE_SECONDS + 2.0, 2 * LEASE_SECONDS)),
)
HANDLER_FAULTS = tuple(FaultKind(f"handler {order}") for order in ("raises", "slow", "hangs"))
CHILD_FAULTS = tuple(FaultKind(f"child {deed}") for deed in (*DEEDS, "fork", "slow", "forget"))
"""Faults of child processes, which replace those of handlers in runs with `leasehold multilang`."""
TIMEOUT_SECONDS = 4
CHILD_SECONDS = TIMEOUT_SECONDS + 2 * EXIT_SECONDS
"""The number of seconds after the end of a child's fault until a misbehaving child has certainly been killed."""
RESHARD_PAUSE_NAMES = frozenset(kind.what for kind in PAUSES_DURING_RESHARD)
STORE_SILENT_MESSAGE = "the store does not respond yet"
ORPHAN_SECONDS = 10.0
DELETED_SECONDS = 30.0
"""How many seconds other workers have to finish the closed shards of a paused worker and to delete their leases.

The time starts when the pause of the worker should end.
"""


def list_table_fault_kinds(table: Table, *, libc: bool) -> tuple[FaultKind, ...]:
    """Return the kinds of faults of a table and of the lines to it.

    Args:
        table: The lease table.
        libc: Whether the workers have the preloaded libc. The fault "disk read-only" needs it.
    """
    if table.control is None:
        full_disk_kinds = (DISK_FULL,) if table.disk and table.disk.small else ()
        return (*full_disk_kinds, *((READ_ONLY,) if libc else ()), HELD, EMPTY_TABLE)
    line_kinds = tuple(
        FaultKind(fault_name, "store")
        for fault_name in ((*WIRE_FAULTS, LOST_RESPONSES) if table.wired else HTTP_FAULTS)
    )
    return (
        *line_kinds,
        *list_one_way_kinds("store", writes=not table.wired),
        PAUSE,
        *((RESTART,) if table.lasts else ()),
        EMPTY_TABLE,
    )


@frozen
class TableWithLines:
    """A lease table, with the workers' lines (proxies) to its service if it has one."""

    table: Table
    lines: Lines | SharedWire | None = None

    def url(self, worker: str) -> str:
        """Return the store's URL for this worker."""
        return self.table.url.format(endpoint=self.endpoint(worker))

    def environment(self, worker: str) -> dict[str, str]:
        """Return the environment variables with the secrets of this worker."""
        return self.table.environment(self.endpoint(worker))

    def endpoint(self, worker: str) -> str:
        """Return the address at which this worker reaches the service."""
        return self.lines.url(worker) if self.lines else ""


@define(kw_only=True)
class Fleet(Stage):
    """The worker processes of a chaos run. The name of a process is its worker's id, a "#" and a number.

    Attributes:
        ground: The stream that the workers read.
        places: The lease table ("store"), and the target table of a swap ("goal") if there is one.
        libc: The libc that is preloaded into the workers, if it could be built.
        multilang: Whether the workers are `leasehold multilang` daemons, which start child processes.
        operator: The operator that swaps the tables, if there is one.
        processes: The name of each worker's latest process.
        leaving: For each worker that is draining, the name of the process and the process itself.
    """

    ground: Ground
    places: Mapping[str, TableWithLines]
    libc: FaultyLibc | None = None
    multilang: bool = False
    operator: SwapOperator | None = None
    processes: dict[str, str] = field(factory=dict)
    leaving: dict[str, tuple[str, Child]] = field(factory=dict)
    _starts: int = 0
    _current_incidents: dict[Fault, Incident] = field(factory=dict)
    _resource_limits: dict[str, ThreadLimit | ResourceLimit] = field(factory=dict)
    _written: list[Tail[WriteAnswer]] = field(factory=list)
    _closed_shards: dict[Fault, tuple[str, ...]] = field(factory=dict)
    _denied: set[str] = field(factory=set)
    """Processes that were denied threads, memory or the lease file. They may end because of this, even later."""

    @property
    def table(self) -> Table:
        """The lease table at the beginning of the run."""
        return self.places["store"].table

    # Workers

    def join(self, worker: str) -> None:
        """Start a process of this worker."""
        if former_process := self.processes.get(worker):
            self._record_leftovers(former_process)
        self._starts += 1
        process = f"{worker}#{self._starts}"
        orders, writes, child_events = (
            self.folder / name for name in (f"{worker}.orders", f"{process}.writes", f"{process}.child-events")
        )
        for file in (orders, writes, child_events):
            file.touch()
        goal_table = self.places.get("goal")
        to_option = ("--to", goal_table.url(worker)) if goal_table else ()
        source, store = self.ground.source(worker), self.places["store"].url(worker)
        if self.multilang:
            arguments: tuple[str, ...] = (DAEMON, str(writes), source, store, f"{CYCLE_SECONDS:g}")
            arguments += (str(self._write_properties_file(worker)), "--attempts", "3", "--verbose")
        else:
            arguments = (MISBEHAVING, str(orders), str(writes), source, "--store", store, *to_option)
            arguments += ("--events", "--worker", worker, *self.settings)
        libc_variables = self.libc.environment(worker) if self.libc else {}
        child_variables = {"CHAOS_EVENTS": str(child_events), "CHAOS_ORDERS": str(orders)}
        environment = {**self.ground.environment(), **libc_variables, **child_variables}
        for table in self.places.values():
            environment |= table.environment(worker)
        with patch.dict(os.environ, environment):
            self.watch_process(Child(process, arguments, self.folder))
        self._tails[-1] = Tail(
            child_events if self.multilang else self._children[process].out,
            lambda line: self.ground.with_judged_key(evolve(parse_event(line), process=process)),
        )
        self._written.append(Tail(writes, lambda line: parse_answer(line, process)))
        self.processes[worker] = process
        self._record_denial(worker)

    def _write_properties_file(self, worker: str) -> Path:
        """Write a daemon's properties file. `unruly_daemon` gets the URLs of the source and the store as arguments."""
        properties = {
            "executableName": f"{sys.executable} {CHILD}",
            "streamName": self.stream.name,
            "applicationName": "chaos",
            "workerId": worker,
            "retrievalMode": "POLLING",
            "failoverTimeMillis": f"{LEASE_SECONDS * 1000:.0f}",
            "shutdownGraceMillis": f"{DRAIN_SECONDS * 500:.0f}",
            "timeoutInSeconds": f"{TIMEOUT_SECONDS}",
        }
        file = self.folder / f"{worker}.properties"
        file.write_text("".join(f"{key} = {value}\n" for key, value in properties.items()))
        return file

    def _record_leftovers(self, process: str) -> None:
        """Record a fault if a process that has ended left running child processes behind."""
        setting, deadline = f"CHAOS_EVENTS={self.folder / f'{process}.child-events'}", time.monotonic() + ORPHAN_SECONDS
        while (processes_left := list(list_processes_with_setting(setting))) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        if processes_left:
            self.history.faults.append(
                f"{process} is gone, and {len(processes_left)} processes that it has started are not"
            )

    def list_process_groups(self) -> dict[str, int]:
        """Return the process group of each worker, by worker id, and that of the operator's command."""
        groups = {
            worker: self._children[process].pid
            for worker, process in list(self.processes.items())
            if process in self._children
        }
        return groups | ({COMMAND: self.operator.group} if self.operator and self.operator.group else {})

    def is_settled(self) -> bool:
        """Return whether each shard is read by its owner, and the workers' lease counts differ by at most one."""
        lease_counts = Counter(lease.owner for lease in self.leases)
        lease_counts_of_workers = [lease_counts[worker] for worker in self.processes]
        all_are_read = all(self.reading.find_reader(lease.shard) == lease.owner for lease in self.leases)
        return (
            all_are_read
            and sum(lease_counts_of_workers) == self.open_shards
            and max(lease_counts_of_workers) - min(lease_counts_of_workers) <= 1
        )

    def list_unexpected_ends(self) -> list[str]:
        """Return descriptions of the processes that did not end as requested, or that left processes behind."""
        failed_processes = [process for process, state in self.workers.items() if "status" in state]
        end_descriptions = [
            f"{process}: {self.workers[process]}" for process in failed_processes if self._had_started(process)
        ]
        for process in self.processes.values():
            self._record_leftovers(process)
        return [*end_descriptions, *(file.read_text() for file in sorted(self.folder.glob("*.faults")))]

    def finish_swap(self, within_seconds: float) -> None:
        """Let the operator finish the swap, and record a fault if the swap does not end or is incomplete.

        The swap may finish only once no worker is draining. A draining worker is replaced by a new process, and if that
        process
        joined after the swap, it would get the message that its store has been replaced.
        """
        if self.operator is None:
            return
        self.until(lambda: not self.leaving, 2 * DRAIN_SECONDS)
        self.operator.may_finish = True
        if not self.until(lambda: self.operator is not None and self.operator.over, within_seconds):
            progress_text = f"it had come to {self.operator.progress}; last output: {self.operator.last_output[-300:]}"
            self.history.faults.append(f"the swap did not end: {progress_text}")
            return
        source_table = self.places["store"]
        with (
            patch.dict(os.environ, source_table.environment(WATCHER)),
            closing(open_driver_store(source_table.url(WATCHER))) as source_store,
        ):
            if unmarked_keys := [
                row.key for row in source_store.list().leases if not is_marked(row) and row.key != CONTROL_KEY
            ]:
                self.history.faults.append(f"the swap is over, and FROM still speaks for {', '.join(unmarked_keys)}")

    def kill_all_workers(self) -> None:
        if self.operator is not None:
            self.operator.kill()
        super().kill_all_workers()

    def _had_started(self, process: str) -> bool:
        """Return whether the process had started to work, so that its exit status matters.

        Before a process logs anything, Python is still loading, and a signal ends the process abnormally. The same
        happens
        while the process waits for a store that does not respond when it is opened. In both cases it holds no leases
        yet.
        """
        log_text = (self.folder / f"{process}.log").read_text(encoding="utf-8", errors="replace")
        return bool(log_text) and (
            STORE_SILENT_MESSAGE not in log_text or (self.folder / f"{process}.writes").stat().st_size > 0
        )

    @property
    def faulty_requests(self) -> int:
        """The number of requests that failed because of a faulty line."""
        return self.ground.faulty_requests + sum(table.lines.met for table in self.places.values() if table.lines)

    def tick(self) -> None:
        """Read the table and the new events, and restart workers whose processes have ended."""
        self._read_table_and_events()
        self.ground.feed_leased_shards({lease.shard for lease in self.leases})
        for worker, (process, child) in list(self.leaving.items()):
            if not child.is_running:
                del self.leaving[worker]
                self._record_drain_end(process, child)
                self.join(worker)
        for process, child in list(self._children.items()):
            if not child.is_running:
                self._restart_ended(process, child)
        if self.operator is not None:
            self.operator.tick()
        self.watched(self)

    def _read_table_and_events(self) -> None:
        # Read the files of the processes first, because the table may not respond. The table is then read at a later
        # tick.
        services = [table.table.control for table in self.places.values()]
        self.history.answers += [answer for file_tail in self._written for answer in file_tail.read_new_items()]
        begin_time = time.time()
        try:
            if not any(service and service.paused for service in services):
                super()._read_table_and_events()
                return
        except (OutcomeUnknown, StoreError):  # the line to the store has no faults
            note = "the store itself did not answer"
            self.history.incidents.append(Incident(begin_time, "trouble", "", time.time() - begin_time, note))
        for file_tail in self._tails:
            for event in file_tail.read_new_items():
                self._record_event(event)

    def _record_drain_end(self, process: str, child: Child) -> None:
        exit_status = child.wait()
        self._record_incident("gone", process, "drained")
        if exit_status and self._had_started(process):
            self.history.faults.append(
                f"{process}, asked to end, ended with status {exit_status}: {child.last_output[-300:]}"
            )

    def _restart_ended(self, process: str, child: Child) -> None:
        """Restart the worker. Record a fault unless the process was denied threads, memory or the lease file."""
        worker, _, _ = process.partition("#")
        del self._children[process]
        self._record_incident("crash", process, "ended by itself")
        self.reading.end_tenures_of_dead_process(process, self.history.incidents[-1].t)
        if process not in self._denied:
            self.history.faults.append(f"{process} ended by itself: {child.last_output[-300:]}")
        self.join(worker)

    # Faults

    def begin(self, fault: Fault) -> None:
        """Cause a fault, and record it."""
        begin_time = time.time()
        affected_name = self._cause_fault(fault)
        if self._is_noticed(fault.kind.what):
            incident_kind: IncidentKind = (
                "nap" if fault.kind.what == "stand still" or fault.kind in PAUSES_DURING_RESHARD else "trouble"
            )
            self._current_incidents[fault] = Incident(begin_time, incident_kind, affected_name, math.inf, str(fault))
            self.history.incidents.append(self._current_incidents[fault])
        for worker in self.processes:
            self._record_denial(worker)

    def _is_noticed(self, fault_name: str) -> bool:
        has_dated_rows = self.ground.dated or any(table.table.dated for table in self.places.values())
        return fault_name not in UNNOTICED_FAULTS or (fault_name in STEPS and has_dated_rows)

    def _record_denial(self, worker: str) -> None:
        """Add the worker's process to `_denied` if a current fault denies it a resource."""
        if any(fault.kind in DENIALS and fault.worker in {"", worker} for fault in self._current_incidents):
            self._denied.add(self.processes[worker])

    def _cause_fault(self, fault: Fault) -> str:
        """Cause the fault, and return the worker or shard that it affects, or "" if it affects all."""
        fault_name, worker = fault.kind.what, fault.worker
        if fault.kind.line:
            return self._cause_fault_of_connections(fault)
        if worker:
            self._cause_fault_of_worker(fault_name, worker)
            if fault.kind in PAUSES_DURING_RESHARD:
                self._closed_shards[fault] = self._reshard_worker(worker, fault_name)
        elif fault.kind == READ_ONLY and self.libc is not None:
            self.libc.refuse_writes(enabled=True)
        elif self.table.disk is not None:
            (self.table.disk.fill_up if fault.kind == DISK_FULL else self.table.disk.hold_transaction)()
        return worker

    def _cause_fault_of_worker(self, fault_name: str, worker: str) -> None:
        # A worker that is still draining has no new process that the fault could affect.
        self.until(lambda: worker not in self.leaving, 2 * DRAIN_SECONDS)
        process = self.processes[worker]
        match fault_name:
            case "kill":
                self.kill(process)
            case "end":
                self.leaving[worker] = (process, self.drain_worker(process))
            case pause_name if pause_name == "stand still" or pause_name in RESHARD_PAUSE_NAMES:
                self._children[process].send_signal(signal.SIGSTOP)
            case "no more threads":
                self._resource_limits[worker] = ThreadLimit(self._children[process].pid)
            case "no more descriptors" | "no more memory":
                # Wait until the process has started to work, because it would end if it lacked memory or descriptors
                # while loading.
                self.until(lambda: self._had_started(process), 2 * DRAIN_SECONDS)
                limit_resource = ResourceLimit.memory if fault_name == NO_MEMORY.what else ResourceLimit.descriptors
                self._resource_limits[worker] = limit_resource(self._children[process].pid)
            case clock_step if clock_step in STEPS and self.libc is not None:
                self.libc.set_clock_ahead(worker, STEPS[clock_step])
            case order:
                if order == ORDER and (lines := self.places["store"].lines) is not None:
                    lines.begin("reset", worker)  # so that there is something to log
                (self.folder / f"{worker}.orders").write_text(order.removeprefix("handler "))

    def _reshard_worker(self, worker: str, fault_name: str) -> tuple[str, ...]:
        """Split or merge an open shard of this worker, and return the shards that are closed as a result.

        While the stream is paused, no shard is closed, and the fault is only a pause of the worker.
        """
        if self.ground.control.paused:
            return ()
        open_shards = {shard.id for shard in self.stream.shards() if shard.open}
        shard_id = min(
            (lease.shard for lease in self.leases if lease.owner == worker and lease.shard in open_shards), default=""
        )
        return self.merge(shard_id) if fault_name.endswith("merge") else (self.split(shard_id),)

    def wait_for_deletion(self, fault: Fault) -> tuple[str, ...]:
        """Wait until the leases of the shards closed during this fault are deleted, and return the shards.

        Return () if the wait exceeds DELETED_SECONDS, or if the stream is paused.
        """
        shards = self._closed_shards.get(fault, ())
        leases_deleted = self.until(lambda: not {lease.shard for lease in self.leases} & set(shards), DELETED_SECONDS)
        return shards if leases_deleted and not self.ground.control.paused else ()

    def drop(self, shards: Collection[str]) -> None:
        """Remove these closed shards from the stream.

        This restarts the stream's service, which is recorded as an incident.
        """
        begin_time = time.time()
        self.ground.drop(shards)
        note = f"the stream dropped {', '.join(shards)}"
        self.history.incidents.append(Incident(begin_time, "trouble", "", time.time() - begin_time, note))

    def _cause_fault_of_connections(self, fault: Fault) -> str:
        fault_name, worker, of_stream = fault.kind.what, fault.worker, fault.kind.line == "stream"
        control, lines = self._find_service_and_lines(fault)
        if fault_name == "split":
            self.split()
        elif fault_name == "merge":
            self.merge()
        elif fault_name == "pause" and control is not None:
            control.pause()
        elif fault.kind == EMPTY_TABLE:
            self._empty_table()
        elif of_stream:
            affected_name = self.ground.begin(fault_name, worker)
            if fault.kind == ANEW:
                self._count_open_shards()
            return affected_name
        elif fault_name == "restart" and control is not None and lines is not None:
            control.restart()
            lines.redirect(control.service.url)
        elif lines is not None:
            lines.begin(fault_name, worker)
        return worker

    def _find_service_and_lines(self, fault: Fault) -> tuple[ServiceControl | None, Lines | SharedWire | None]:
        """Return the service that the fault affects, and the workers' lines to it (None if it is a stream)."""
        if fault.kind.line == "stream":
            return self.ground.control, None
        table_with_lines = self.places.get(fault.kind.line)
        return (table_with_lines.table.control, table_with_lines.lines) if table_with_lines else (None, None)

    def _empty_table(self) -> None:
        """Delete every row, or the file, without the workers' knowledge."""
        send_time = time.time()
        shards = {lease.shard for lease in self.leases}
        if self.table.disk is not None:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.table.disk.file}{suffix}").unlink(missing_ok=True)
        else:
            deadline = time.monotonic() + LEASE_SECONDS
            while time.monotonic() < deadline:
                with suppress(OutcomeUnknown):
                    rows = self.store.list().leases
                    shards |= {lease.shard for lease in rows}
                    if not [row for row in rows if isinstance(self.store.write(DeleteLease(row)), Lost)]:
                        break
        self.history.answers += [
            WriteAnswer(time.time(), send_time, OPERATOR, "delete", shard, "done") for shard in sorted(shards)
        ]

    def end_fault(self, fault: Fault) -> None:
        """End the fault, and record how long it lasted. A fault of a child may last `CHILD_SECONDS` longer.

        If a line to a store carries only one direction, other workers must take over the shards (L-one-way). Such a
        fault therefore explains only effects at its beginning and at its end.
        """
        self._undo_fault(fault)
        if (incident := self._current_incidents.pop(fault, None)) is not None:
            incident_index = self.history.incidents.index(incident)
            extra_allowed_seconds = CHILD_SECONDS if fault.kind in CHILD_FAULTS else 0.0
            is_one_way, end_time = fault.kind.what in ONE_WAY and fault.kind.line != "stream", time.time()
            self.history.incidents[incident_index] = evolve(
                incident, seconds=0.0 if is_one_way else end_time + extra_allowed_seconds - incident.t
            )
            if is_one_way:
                self.history.incidents.append(evolve(incident, t=end_time, seconds=0.0, note=f"the end of {fault}"))

    def _undo_fault(self, fault: Fault) -> None:
        fault_name, worker, line = fault.kind.what, fault.worker, fault.kind.line
        control, lines = self._find_service_and_lines(fault)
        if fault_name == "pause":
            assert control is not None
            control.resume()
        elif line == "stream":
            self.ground.end(fault_name, worker)
        elif line and worker and lines is not None:
            lines.end(fault_name, worker)
        elif worker:
            self._undo_fault_of_worker(fault_name, worker)
        elif fault.kind == READ_ONLY and self.libc is not None:
            self.libc.refuse_writes(enabled=False)
        elif not line and self.table.disk is not None:
            (self.table.disk.free_space if fault.kind == DISK_FULL else self.table.disk.end_transaction)()

    def _undo_fault_of_worker(self, fault_name: str, worker: str) -> None:
        match fault_name:
            case "kill":
                self.join(worker)
            case pause_name if pause_name == "stand still" or pause_name in RESHARD_PAUSE_NAMES:
                self._children[self.processes[worker]].send_signal(signal.SIGCONT)
            case "no more threads" | "no more descriptors" | "no more memory":
                self._resource_limits.pop(worker).end()
            case clock_step if clock_step in STEPS and self.libc is not None:
                self.libc.set_clock_ahead(worker, 0)
            case order:
                if order == ORDER and (lines := self.places["store"].lines) is not None:
                    lines.end("reset", worker)
                (self.folder / f"{worker}.orders").write_text("")
