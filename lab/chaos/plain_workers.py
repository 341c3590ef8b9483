"""Runs plain workers over local services with faults drawn from a seed, and judges the run.

    python lab/chaos/plain_workers.py --seed 7 --seconds 120 --source event-hubs --store azblob

Records are put continuously. After the last fault has ended, all records must arrive, and the workers drain. The
verdict lists records that were lost or dispatched out of order, and records that were delayed or dispatched again
although no fault explains it.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.extend(str(Path(__file__).parents[2] / "tests" / folder) for folder in ("", "fleet", "multilang"))

from attrs import define, evolve, frozen
from feed import Feed
from fleet import (
    CHILD_FAULTS,
    CLOCK_FAULTS,
    EMPTY_TABLE,
    HANDLER_FAULTS,
    LOG_RAISES,
    NO_DESCRIPTORS,
    NO_MEMORY,
    NO_THREADS,
    SETTINGS,
    WORKER_FAULTS,
    Fleet,
    TableWithLines,
    list_table_fault_kinds,
)
from grounds import (
    ANEW,
    PAUSE,
    PAUSES_DURING_RESHARD,
    RESTART,
    SAVE_SECONDS,
    WATCHER,
    ChaosHubStream,
    ChaosKinesisStream,
    open_hub_ground,
    open_kinesis_ground,
)
from libc import FaultyLibc, has_compiler
from processes import can_limit_threads, find_client_at_port
from schedule import Fault, FaultKind, draw_schedule
from services import STORES, ServiceMissing, open_driver_store, open_table
from swap_command import COMMAND, SwapOperator
from unsteady_line import Lines
from wired import SharedWire

from leasehold.adapters.ops.doctor.examination import gap_seconds
from leasehold.balancer.config import Config
from leasehold.stores.protocol import Capabilities, Store
from leasehold.stores.swap import SwapStore
from leasehold.stores.urls import display_name
from leasehold_lab.demo.child import ENVIRONMENT, HIDDEN_VARIABLES
from leasehold_lab.demo.stage import TICK_SECONDS
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.explanations import Explanations, RecordWait, RunVerdict, judge_finished_run
from leasehold_lab.judge.tenures import compute_tenures, group_by_shard

SOURCES = ("kinesis", "event-hubs")
CONSUMERS = ("function", "multilang")
FAULT_FREE_SECONDS, ARRIVE_SECONDS, REPORT_SECONDS = 6.0, 90.0, 5.0
SILENCE_SECONDS = 4.0
"""The delay in seconds until other workers list the table if the lookout has died (C8).

Only then do they begin to measure how long the lookout's leases have not been renewed.
"""
NOTICE_SECONDS = 2.0, 6.0
"""The seconds by which the machine delays a change of owner: when idle, and when its load is three times too high."""
CONFIG = Config(lease_seconds=6.0, cycle_seconds=2.0)
FAULTS_THAT_STOP_FEED = frozenset({PAUSE, RESTART, ANEW})


@frozen
class RunRequest:
    """The requested run.

    Attributes:
        to: The store to which the leases are swapped during the run, or "" for no swap.
        only: If set, only faults whose names contain this string are caused.
    """

    seed: int
    seconds: float
    source: str = "kinesis"
    store: str = "dynamodb"
    layout: str = ""
    to: str = ""
    to_layout: str = ""
    consumer: str = "function"
    workers: int = 5
    only: str = ""


@frozen
class RunOutcome:
    """The result of a run.

    Attributes:
        load: The machine's load average over the last five minutes of the run.
        limits: The limits with which the run was judged.
        faults: The number of faults of each kind.
        faulty_requests: The number of requests that failed because of a faulty line.
        writes: The number of writes with each outcome.
        slow: The number of times that the driver found a service slow although it had no fault.
        longest: The record that waited longest, with the explanation.
        swap: A summary of the operator's swap commands.
    """

    request: RunRequest
    load: float
    verdict: RunVerdict
    limits: JudgeLimits
    faults: Counter[str]
    faulty_requests: int
    writes: Counter[str]
    slow: int
    longest: RecordWait | None
    swap: str = ""

    def __str__(self) -> str:
        verdict, longest_wait = self.verdict, self.longest
        changes_with_duplicates = [change for change in verdict.owner_changes if change.duplicates]
        request = self.request
        lines = [
            f"run          {request.source}, {request.store} {request.layout}".rstrip()
            + f", seed {request.seed}, {request.seconds:g} s; load {self.load:.0f}",
            f"records      {verdict.produced:,} sent, {verdict.lost} lost, {verdict.strangers} never sent",
            f"order        {sum(breach_found.what == 'out of order' for breach_found in verdict.faults)} breaks",
            (
                f"duplicates   {verdict.duplicates:,}, at {len(changes_with_duplicates)} "
                f"of {len(verdict.owner_changes)} reader changes"
            ),
            "writes       " + ", ".join(f"{count:,} {item}" for item, count in sorted(self.writes.items())),
            f"faults       {sum(self.faults.values())}, {self.faulty_requests:,} requests: "
            + ", ".join(f"{item} {count}" for item, count in sorted(self.faults.items())),
        ]
        if self.swap:
            lines.append(f"swap         to {request.to} {request.to_layout}".rstrip() + f": {self.swap}")
        lines.append(f"bystander    found a service slow by itself {self.slow} times")
        if longest_wait is not None:
            explaining_faults = ", ".join(dict.fromkeys(longest_wait.faults)) or "no fault"
            lines.append(
                f"longest wait {longest_wait.seconds:.1f} s, of {longest_wait.shard}; in reach: {explaining_faults}"
            )
            allowed_text = f"{self.limits.wait_seconds:.1f} s of a wait want no fault"
            lines.append(f"judged by    {allowed_text}; a fault reaches on for {self.limits.reach_seconds:.1f} s")
        lines += [f"BREACH       {breach}" for breach in verdict.faults]
        return "\n".join([*lines, "good" if verdict.ok else "NOT GOOD"])


@contextmanager
def open_fleet(request: RunRequest, workers: Sequence[str], folder: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleets: list[Fleet] = []

        def find_client_of_port(port: int) -> str:
            return find_client_at_port(port, {} if not fleets else fleets[0].list_process_groups())

        hub_address = ""
        chaos_stream: ChaosKinesisStream | ChaosHubStream
        if request.source == "kinesis":
            chaos_stream = stack.enter_context(open_kinesis_ground(folder, workers, request.seed))
        else:
            chaos_stream = stack.enter_context(open_hub_ground(find_client_of_port))
            hub_address = chaos_stream.source("").removeprefix("eventhubs://").partition("?")[0]
        requested_tables = {"store": (request.store, request.layout)} | (
            {"goal": (request.to, request.to_layout)} if request.to else {}
        )
        line_names = (*workers, WATCHER, COMMAND)
        tables_by_role: dict[str, TableWithLines] = {}
        for role, (store_kind, layout) in requested_tables.items():
            table = stack.enter_context(open_table(store_kind, folder / role, hub_address, layout))
            service_control = table.control
            if service_control is None:
                tables_by_role[role] = TableWithLines(table)
            elif table.wired:
                shared_wire = stack.enter_context(SharedWire.laid(service_control.service.url, find_client_of_port))
                tables_by_role[role] = TableWithLines(table, shared_wire)
            else:
                lines = Lines.laid(service_control.service.url, line_names, f"{request.seed} {role}", table.refused)
                tables_by_role[role] = TableWithLines(table, stack.enter_context(lines))
        store, swap_operator = stack.enter_context(closing(_open_driver_store(tables_by_role))), None
        if goal_table := tables_by_role.get("goal"):
            environment = tables_by_role["store"].environment(COMMAND) | goal_table.environment(COMMAND)
            addresses = tables_by_role["store"].url(COMMAND), goal_table.url(COMMAND)
            swap_operator = SwapOperator(addresses, environment, folder, f"{request.seed} swap")
        table = tables_by_role["store"].table
        disk = table.disk.folder if table.disk else folder / "disk"
        libc = FaultyLibc.compile(folder, workers, disk) if has_compiler() else None
        fleet = Fleet(
            folder,
            chaos_stream.stream,
            store,
            table.url,
            SETTINGS,
            ground=chaos_stream,
            places=tables_by_role,
            libc=libc,
            operator=swap_operator,
            multilang=request.consumer == "multilang",
        )
        fleets.append(fleet)
        stack.callback(fleet.kill_all_workers)
        yield fleet


def _open_driver_store(tables_by_role: Mapping[str, TableWithLines]) -> Store:
    """Return the store for the driver, over lines that never fail."""
    driver_stores = []
    for table in tables_by_role.values():
        with patch.dict(os.environ, table.environment(WATCHER)):
            driver_stores.append(open_driver_store(table.url(WATCHER)))
    if "goal" not in tables_by_role:
        return driver_stores[0]
    return SwapStore((driver_stores[0], driver_stores[1]), display_name(tables_by_role["goal"].url(WATCHER)))


def run_chaos(request: RunRequest, folder: Path, report: Callable[[str], None]) -> RunOutcome:
    workers = [f"worker-{number}" for number in range(1, request.workers + 1)]
    with open_fleet(request, workers, folder) as fleet:
        feed = Feed(fleet.ground)
        kinds = [kind for kind in list_fault_kinds(fleet, report) if request.only in _format_fault_kind(kind)]
        faults = draw_schedule(request.seed, request.seconds - FAULT_FREE_SECONDS, kinds, workers)
        try:
            FaultSchedulePlayer(fleet, feed, request, report).play_schedule(faults, workers)
        finally:
            feed.end()
        history = evolve(
            fleet.build_history(feed.list_expected_records(fleet.distinct_records)), recreated_at=feed.recreated_at
        )
        history.faults += feed.failed
        history.incidents += feed.slow
    tenures, limits = (
        group_by_shard(compute_tenures(history).tenures),
        compute_limits(workers, fleet.store.capabilities),
    )
    return RunOutcome(
        request,
        os.getloadavg()[1],
        judge_finished_run(history, limits),
        limits,
        Counter(_format_fault_kind(fault.kind) for fault in faults),
        fleet.faulty_requests,
        Counter(entry.outcome for entry in history.answers),
        sum(" itself " in entry.note for entry in history.incidents),
        Explanations(history, tenures, limits).find_longest_wait(),
        str(fleet.operator or ""),
    )


def list_fault_kinds(fleet: Fleet, report: Callable[[str], None]) -> list[FaultKind]:
    """Return the kinds of faults that this machine can cause, and report those that it cannot."""
    has_libc, can_deny_threads = fleet.libc is not None, can_limit_threads()
    if not has_libc:
        report("NO CLOCK IS STEPPED, AND NO DISK READ-ONLY: there is no C compiler (cc)")
    if not can_deny_threads:
        report("NO THREADS ARE REFUSED: this user may make no control group of pids")
    denial_kinds, thread_denial_kinds = (NO_DESCRIPTORS, NO_MEMORY), (NO_THREADS,) if can_deny_threads else ()
    table_faults = list_table_fault_kinds(fleet.table, libc=has_libc)
    # Runs with child processes or with a swap don't empty the table, and have only those faults of the stream that
    # concern shards.
    lasting_table_faults = [kind for kind in table_faults if kind.what != EMPTY_TABLE.what]
    shard_kinds = [
        kind for kind in fleet.ground.kinds if kind.what in {"split", "merge"} or kind in PAUSES_DURING_RESHARD
    ]
    if fleet.multilang:
        return [
            *WORKER_FAULTS,
            *CHILD_FAULTS,
            LOG_RAISES,
            *lasting_table_faults,
            *shard_kinds,
            *denial_kinds,
            *thread_denial_kinds,
        ]
    if goal_table := fleet.places.get("goal"):
        goal_kinds = [
            evolve(kind, line="goal")
            for kind in list_table_fault_kinds(goal_table.table, libc=False)
            if kind.what != EMPTY_TABLE.what
        ]
        return [*WORKER_FAULTS, *HANDLER_FAULTS, LOG_RAISES, *lasting_table_faults, *goal_kinds, *shard_kinds]
    stream_and_table_kinds = [
        *WORKER_FAULTS,
        *HANDLER_FAULTS,
        LOG_RAISES,
        *table_faults,
        *fleet.ground.kinds,
        *denial_kinds,
    ]
    return [*stream_and_table_kinds, *(CLOCK_FAULTS if has_libc else ()), *thread_denial_kinds]


def measure_notice_seconds() -> float:
    """Return by how many seconds the machine's recent load delays a change of owner."""
    min_seconds, max_seconds = NOTICE_SECONDS
    return min(max(min_seconds, min_seconds * os.getloadavg()[1] / (os.cpu_count() or 1)), max_seconds)


def compute_limits(workers: Sequence[str], capabilities: Capabilities) -> JudgeLimits:
    """Return the judge's limits for these workers and this table layout, given the machine's recent load."""
    notice_wait_seconds = measure_notice_seconds()
    return JudgeLimits(
        lease_seconds=dict.fromkeys(workers, CONFIG.lease_seconds),
        notice_seconds=notice_wait_seconds,
        owned_checkpoints=capabilities.owner_checked_checkpoint,
        wait_seconds=CONFIG.cycle_seconds + notice_wait_seconds,
        reach_seconds=gap_seconds(CONFIG) + SILENCE_SECONDS + notice_wait_seconds,
    )


def _format_fault_kind(kind: FaultKind) -> str:
    return f"{kind.line} {kind.what}".strip()


@define
class FaultSchedulePlayer:
    """Runs a schedule of faults against a fleet."""

    fleet: Fleet
    feed: Feed
    request: RunRequest
    report: Callable[[str], None]
    _began: float = 0.0
    _last_report: float = 0.0

    def play_schedule(self, faults: Sequence[Fault], workers: Sequence[str]) -> None:
        """Start all workers, cause and end all faults, wait until all records have arrived, and drain the workers."""
        fleet = self.fleet
        for worker in workers:
            fleet.join(worker)
        if not fleet.until(fleet.is_settled, ARRIVE_SECONDS):
            self.report(f"NOT EVERY SHARD IS READ {ARRIVE_SECONDS:g} s AFTER ALL HAVE JOINED: the machine is too busy")
        self.feed.begin()
        self._began = time.monotonic()
        for due_seconds, is_end, fault in sorted(_list_transitions(faults), key=lambda transition: transition[:2]):
            self._tick_until(due_seconds)
            begin_time = time.monotonic()
            self._begin_or_end(fault, is_end=is_end)
            # If causing a fault takes long (as a restart or a split does), postpone the other faults. Otherwise all of
            # them would be due at once.
            self._began += time.monotonic() - begin_time
        self._tick_until(self.request.seconds)
        # A swap makes many requests in sequence, and the machine's load delays each.
        fleet.finish_swap(ARRIVE_SECONDS * measure_notice_seconds() / NOTICE_SECONDS[0])
        self.feed.end()
        fleet.until(
            lambda: (
                not fleet.leaving
                and len(fleet.distinct_records) >= len(self.feed.list_expected_records(fleet.distinct_records))
            ),
            ARRIVE_SECONDS,
        )
        fleet.end()
        fleet.history.faults += fleet.list_unexpected_ends()

    def _begin_or_end(self, fault: Fault, *, is_end: bool) -> None:
        if not is_end:
            self._report_progress(str(fault))
            # Stop the feed while the stream does not respond, because the outcome of a put would be unknown.
            if fault.kind in FAULTS_THAT_STOP_FEED:
                self.feed.gate.acquire()
            if fault.kind == ANEW:
                self.feed.record_stream_deletion()
            if fault.kind.what == "restart":
                self.fleet.pause(SAVE_SECONDS)
            self.fleet.begin(fault)
        else:
            if (
                fault.kind in PAUSES_DURING_RESHARD
                and (shards := self.fleet.wait_for_deletion(fault))
                and fault.kind.what.endswith("trim")
            ):
                with self.feed.gate:
                    self.fleet.pause(SAVE_SECONDS)
                    self.fleet.drop(shards)
            self.fleet.end_fault(fault)
            if fault.kind in FAULTS_THAT_STOP_FEED:
                self.feed.gate.release()

    def _tick_until(self, until: float) -> None:
        while (seconds_left := self._began + until - time.monotonic()) > 0:
            time.sleep(min(seconds_left, TICK_SECONDS))
            self.fleet.tick()
            if time.monotonic() > self._last_report + REPORT_SECONDS:
                self._report_progress("")

    def _report_progress(self, message: str) -> None:
        self._last_report = time.monotonic()
        progress_line = f"sent {len(self.feed.sent):7,}  delivered {len(self.fleet.distinct_records):7,}"
        self.report(f"{self._last_report - self._began:6.1f} s  {progress_line}  {message}".rstrip())


def _list_transitions(faults: Sequence[Fault]) -> Iterator[tuple[float, bool, Fault]]:
    for fault in faults:
        yield fault.at, False, fault
        yield fault.until, True, fault


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--seed", type=int, default=1, help="of the schedule (%(default)s)")
    options.add_argument("--seconds", type=float, default=120.0, help="for which faults are played (%(default)s)")
    options.add_argument("--source", choices=SOURCES, default="kinesis")
    options.add_argument("--store", choices=STORES, default="dynamodb")
    options.add_argument("--layout", choices=("", "sessions"), default="", help="of the table (the usual one)")
    options.add_argument("--to", choices=STORES, default="", help="swap the leases to this store meanwhile")
    options.add_argument("--to-layout", choices=("", "sessions"), default="", help="of that table")
    options.add_argument(
        "--consumer", choices=CONSUMERS, default=CONSUMERS[0], help="multilang: unruly children read (%(default)s)"
    )
    options.add_argument("--workers", type=int, default=5, help="processes (%(default)s)")
    options.add_argument("--only", default="", help="play only faults whose names contain this (all)")
    options.add_argument("--folder", type=Path, help="where processes write; kept (default: one that is removed)")
    arguments = vars(options.parse_args())
    if arguments["consumer"] == "multilang" and (arguments["source"] != "kinesis" or arguments["to"]):
        options.error("--consumer multilang: it reads Kinesis, and takes part in no swap")
    chosen_folder = arguments.pop("folder")
    for name in HIDDEN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    run_request = RunRequest(**arguments)
    print_to_stderr(f"{run_request}")
    with tempfile.TemporaryDirectory(prefix="leasehold-chaos-") as folder:
        run_folder = chosen_folder or Path(folder)
        run_folder.mkdir(parents=True, exist_ok=True)
        try:
            outcome = run_chaos(run_request, run_folder, print_to_stderr)
        except ServiceMissing as exc:
            sys.stdout.write(f"{run_request.store} IS NOT TRIED: {exc}\n")
            return 0
    sys.stdout.write(f"{outcome}\n")
    return 0 if outcome.verdict.ok else 1


def print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
