"""Tests the status of a real worker under real faults, as the commands show it.

If a fault lasts longer than a minute, the status is not OK, and a sentence names the fault. The status is OK again soon
after the fault has ended. Slowness alone is not a fault. The lag is at least the age of the first record that is not
acknowledged. `explain`, the responses and metrics of `serve`, and the alarms on these metrics agree with `leases`. The
cases run side by side, because they spend nearly all of their time waiting.

`STATUS_CASES=. pytest -m '' -n 0 tests/cli/test_status_from_outside.py` prints a table with a row for each case,
and the failures of a case below its row. This takes half an hour. `STATUS_CASES=gcs-table` runs only the cases whose
names match this pattern. Without the variable, every fifth case is run. A failed case is repeated by itself, because
cases that run side by side are slow.
"""

import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch
from urllib.parse import urlsplit

import boto3
import pytest
from attrs import define, evolve, field, frozen
from botocore.exceptions import ClientError
from standins.fake_gcs import fake_gcs
from standins.line_with_faults import FaultyLine, faulty_line
from standins.wire_with_faults import FaultyWire, faulty_wire

from leasehold.adapters.consumer.status import NUMBERS
from leasehold.adapters.ops.watching import TableWatch, WatchedTable
from leasehold.adapters.toolchain import ServiceError
from leasehold.adapters.worker.progress import RETRIED_RENEWAL_FRACTION, SILENT_SECONDS
from leasehold.errors import StoreError
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store
from leasehold_lab.standins.hubs.event_hubs import LocalHubs, event_hubs, has_engine
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import build_conninfo, build_store_url, run_postgres
from leasehold_lab.standins.services import (
    AZURITE_ACCOUNT,
    azurite_connection_string,
    run_azurite,
    run_dynalite,
    run_kinesis_local,
    run_moto,
)
from leasehold_lab.standins.tables import TableStreams, run_table_server

if TYPE_CHECKING:
    import psycopg
    from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.slow]

LEASE_SECONDS = 10.0
FAULT_SHOWN_SECONDS = max(60.0, 2 * LEASE_SECONDS)
"""The time limit for showing a fault: a minute or two lease durations, whichever is longer."""
QUIET_SECONDS = 75.0
RECOVERY_SECONDS = LEASE_SECONDS + 20.0
"""The time limit for recovery. It allows for the delay of a machine whose two processors run twenty workers."""
ASIDE_SECONDS = 60.0
"""The time for which a worker leaves a lease to other workers after its handler failed."""
START_SECONDS = 150.0
"""The time limit for the first OK. All workers start at once, on as few as two processors."""
RESTART_SECONDS = 30.0
"""The time that a restarted worker may take to begin reading while twenty others run."""
UNANSWERED_SECONDS = 50.0
"""The time in which a worker makes no new claim after a claim without a response.

PostgreSQL may still carry out a claim that waits for a lock.
"""
RESPONSE_SECONDS = 0.5
"""How long a response of a local service may take on a busy machine."""
STEP_SECONDS = 1.0
PARALLEL_TRIALS = 8
"""The number of trials that run at once. Each starts a worker, and there may be only two processors."""
ROOT = Path(__file__).parents[2]
LEASEHOLD = (sys.executable, "-P", "-c", "from leasehold.adapters.cli import run; run()")

HANDLER = """
import asyncio, pathlib, time
MODE = pathlib.Path(__file__).with_name("mode")
def handle(batch):
    mode = MODE.read_text()
    if mode == "raises" or (mode == "poison" and any(b"poison" in each.data for each in batch.records)):
        raise ValueError("no handler takes it")
    while mode == "hangs" and MODE.read_text() == "hangs":
        time.sleep(0.2)
    if mode == "sleeps":
        time.sleep(8)
async def handle_async(batch):
    mode = MODE.read_text()
    while mode == "hangs" and MODE.read_text() == "hangs":
        await asyncio.sleep(0.2)
    if mode == "sleeps":
        await asyncio.sleep(8)
    if mode == "blocks":
        time.sleep(8)
"""

CLOCK = """
import pathlib, time
STEP, real = pathlib.Path(__file__).with_name("step"), time.time
time.time = lambda: real() + (float(STEP.read_text()) if STEP.exists() else 0.0)
"""
"""A `sitecustomize` that shifts the worker's wall clock by the seconds in a file, but not its monotonic clock."""

CLOCK_STEPS = {"forwards": 300.0, "backwards": -300.0}
ALARMS = {
    "LeaseholdNotRead": r"expr: leasehold_lease_status > (\d+)",
    "LeaseholdBehind": r"leasehold_lease_status == (\d+)",
}


@frozen
class Case:
    """A fault of a source, a store or a handler, with the status and the cause that must be shown."""

    source: str
    store: str
    where: str
    how: str
    words: tuple[str, ...]
    cause: str
    suffix: str = ""

    @property
    def name(self) -> str:
        """The name of the case and of its stream."""
        return f"{self.source}-{self.store}-{self.where}-{self.how}{self.suffix}"


STALLED, ORPHAN, HUNG, OK = ("STALLED",), ("ORPHAN",), ("HUNG",), ("OK",)
UNHEARD = r"has not been heard of|nobody owns it"
SILENT = r"not answer|no response for|no answer|the stream has not responded to the last request"
RAISED = r"its handler raised ValueError"
AT_WORK = r"its handler has been at work"
EXPECTED_STATUSES = {
    "stream silent": (STALLED, SILENT),
    "stream mute": (STALLED, SILENT),  # the proxy passes on requests, but no responses
    "stream slow": (OK, ""),
    "stream dripping": (STALLED, rf"an answer of the stream has been on its way|{SILENT}"),
    "stream throttled": (STALLED, r"Throughput|slow down|limit"),
    "stream refused": (STALLED, r"AccessDenied|may not|lack"),
    "stream cut": (STALLED, rf"onnection|reach|{SILENT}"),
    "stream deleted": (STALLED, r"not found|there is no|no longer exists"),
    "stream recreated": (("UNREAD",), r"was made anew"),
    "other stream": (OK, ""),  # a worker that reads another stream refuses the table, and the group continues
    "handler raises": (STALLED, RAISED),
    "handler poison": (STALLED, RAISED),
    "handler hangs": (HUNG, AT_WORK),
    "handler sleeps": (OK, ""),
    "async sleeps": (OK, ""),
    "async blocks": (OK, ""),
    "async hangs": (HUNG, AT_WORK),
    "letter lost": (STALLED, rf"{RAISED}.*; the dead letter.*file://"),
    "letter full": (STALLED, rf"{RAISED}.*; the dead letter.*file://"),
    "worker killed": (ORPHAN, UNHEARD),
    "worker stopped": (ORPHAN, UNHEARD),
    "pair raises": (OK, ""),  # the other worker takes the lease that the first one puts aside
    "clock forwards": (OK, ""),
    # A single look cannot distinguish a slow clock from a silent owner; a watch can.
    "clock backwards": (ORPHAN, UNHEARD),
    "disk full": (ORPHAN, UNHEARD),
    "table silent": (ORPHAN, UNHEARD),
    "table mute": (ORPHAN, UNHEARD),
    "table slow": (ORPHAN, UNHEARD),  # no renewal comes in time
    "table dripping": (ORPHAN, UNHEARD),
    "table throttled": (ORPHAN, UNHEARD),
    "table refused": (ORPHAN, UNHEARD),
    "table unwritable": (ORPHAN, UNHEARD),
    "table cut": (ORPHAN, UNHEARD),
    "table locked": (ORPHAN, UNHEARD),
}
"""For each fault, the possible statuses, and the pattern that the sentence must match."""

PROXY_FAULTS = "silent mute slow dripping throttled refused cut"
"""The faults that a proxy in front of a service of AWS can have."""

# The layout of the Azure SDKs is left out. Its rows contain nothing about reading, so a single look never knows the
# status.
CASE_TABLE = [
    ("kinesis", "sqlite", "stream", f"{PROXY_FAULTS} deleted recreated"),
    ("kinesis", "sqlite", "handler", "raises hangs sleeps poison"),
    ("kinesis", "sqlite", "async", "sleeps blocks hangs"),
    ("kinesis", "sqlite", "letter", "lost"),
    ("kinesis", "sqlite", "worker", "killed stopped"),
    ("kinesis", "sqlite", "pair", "raises"),
    ("kinesis", "sqlite", "other", "stream"),
    ("kinesis", "sqlite", "clock", "forwards backwards"),
    ("kinesis", "sqlite", "disk", "full"),
    ("kinesis", "sqlite", "table", "locked"),
    ("dynamodb-streams", "sqlite", "stream", PROXY_FAULTS),
    ("dynamodb-streams", "sqlite", "handler", "raises hangs sleeps poison"),
    ("dynamodb-streams", "dynamodb", "table", "silent throttled"),
    ("dynamodb-streams", "dynamodb", "worker", "killed"),
    ("eventhubs", "sqlite", "stream", "silent mute slow dripping cut"),
    ("eventhubs", "sqlite", "handler", "raises hangs sleeps poison"),
    ("eventhubs", "sqlite", "worker", "killed"),
    ("eventhubs", "sqlite", "clock", "forwards backwards"),
    ("eventhubs", "azblob", "handler", "raises"),
    ("eventhubs", "azblob", "table", "silent refused"),
    ("kinesis", "dynamodb", "table", f"{PROXY_FAULTS} unwritable"),
    ("kinesis", "dynamodb", "handler", "raises hangs"),
    ("kinesis", "dynamodb", "letter", "full"),
    ("kinesis", "dynamodb", "worker", "killed"),
    ("kinesis", "dynamodb", "clock", "forwards backwards"),
    ("kinesis", "dynamodb", "other", "stream"),
    ("kinesis", "azblob", "table", f"{PROXY_FAULTS} unwritable"),
    ("kinesis", "azblob", "handler", "raises"),
    ("kinesis", "azblob", "worker", "killed"),
    ("kinesis", "s3", "table", f"{PROXY_FAULTS} unwritable"),
    ("kinesis", "s3", "handler", "raises"),
    ("kinesis", "s3", "worker", "killed"),
    ("kinesis", "gcs", "table", f"{PROXY_FAULTS} unwritable"),
    ("kinesis", "gcs", "handler", "raises"),
    ("kinesis", "gcs", "worker", "killed"),
    ("kinesis", "postgres", "table", "silent mute slow dripping cut locked"),
    ("kinesis", "postgres", "handler", "raises"),
    ("kinesis", "postgres", "worker", "killed"),
    ("kinesis", "postgres", "clock", "backwards"),
]
HARMLESS = {"kinesis-azblob-table-dripping", "kinesis-s3-table-dripping"}
"""Cases whose status stays OK, because responses to renewals and checkpoints have no body that could come late."""


def make_case(source: str, store: str, fault_place: str, fault_kind: str) -> Case:
    """Return the case, together with the status and the cause that the command must show for it."""
    expected_statuses, cause = EXPECTED_STATUSES[f"{fault_place} {fault_kind}"]
    case = Case(source, store, fault_place, fault_kind, expected_statuses, cause)
    return evolve(case, words=OK, cause="") if case.name in HARMLESS else case


CASES = [make_case(source, store, where, how) for source, store, where, hows in CASE_TABLE for how in hows.split()]


@define
class Services:
    """The services that the cases share, and a proxy for each case."""

    stack: ExitStack
    kinesis: str
    dynamodb: str
    postgres: Service | None
    azurite: Service
    moto: str
    gcs: str

    def have(self, case: Case) -> bool:
        """Return whether this machine has the services of the case."""
        is_missing = {"postgres": self.postgres is None, "gcs": not self.gcs, "eventhubs": not has_engine()}
        return not any(is_missing.get(service, False) for service in (case.source, case.store))


@define(eq=False)
class Trial:
    """A worker in its own process, a growing stream, and an observer."""

    case: Case
    services: Services
    folder: Path
    stack: ExitStack = field(factory=ExitStack)
    hubs: LocalHubs | None = None
    line: FaultyLine | FaultyWire | None = None
    lock: "sqlite3.Connection | psycopg.Connection | None" = None
    env: dict[str, str] = field(factory=dict)
    url: str = ""
    store: str = ""
    worker: "subprocess.Popen[bytes] | None" = None
    put: list[tuple[int, float]] = field(factory=list)
    source: str = ""
    said: str = ""
    table_store: Store | None = None
    made: "KinesisClient | None" = None
    table_streams: TableStreams | None = None
    other: "subprocess.Popen[bytes] | None" = None

    def prepare(self) -> None:
        case, services = self.case, self.services
        (self.folder / "shape.py").write_text(HANDLER)
        self.mode("well")
        table = f"dynamodb://{case.name}?region=eu-west-1&endpoint"
        bucket = f"s3://{case.name}/fleet?region=eu-west-1&endpoint"
        match case.source:
            case "dynamodb-streams":
                self.table_streams = TableStreams(name=case.name, open_shard_count=1)
                endpoint = self.stack.enter_context(run_table_server(self.table_streams))
                endpoint = self.faulty(endpoint) if case.where == "stream" else endpoint
                self.source = f"dynamodb-streams://{case.name}?region=eu-west-1&endpoint={endpoint}"
            case "kinesis":
                self.create_stream(case.name)
                endpoint = self.faulty(services.kinesis) if case.where == "stream" else services.kinesis
                self.source = f"kinesis://{case.name}?region=eu-west-1&endpoint={endpoint}"
            case "eventhubs":
                self.hubs = hubs = self.stack.enter_context(event_hubs({"orders": 1}))
                if case.where == "stream" and case.how != "silent":
                    hubs = evolve(hubs, address=f"localhost:{self.wire(hubs.service.port).port}")
                self.source = f"eventhubs://{hubs.namespace}/orders"
                self.env["EVENTHUBS_CONNECTION_STRING"] = hubs.connection_string()
        # The observer's connection to the table has no fault.
        faulty = case.where == "table"
        match case.store:
            case "sqlite":
                self.store = self.url = f"sqlite://{self.folder}/leases.db"
            case "dynamodb":
                self.store = f"{table}={services.dynamodb}"
                self.url = f"{table}={self.faulty(services.dynamodb)}" if faulty else self.store
            case "s3":
                self.store, self.url = f"{bucket}={services.moto}", f"{bucket}={self.faulty(services.moto)}"
            case "gcs":
                bucket = f"gcs://{case.name}/fleet?endpoint"
                self.store, self.url = f"{bucket}={services.gcs}", f"{bucket}={self.faulty(services.gcs)}"
            case "azblob":
                self.store = self.url = f"azblob://{AZURITE_ACCOUNT}/{case.name}?prefix=fleet"
                proxied_azurite = evolve(services.azurite, url=self.faulty(services.azurite.url))
                self.env[CONNECTION_STRING_VARIABLE] = azurite_connection_string(proxied_azurite)
            case "postgres":
                assert services.postgres is not None
                name = f"leases_{case.where}_{case.how}"
                self.store = self.url = build_store_url(services.postgres, name)
                if faulty and case.how != "locked":
                    self.url = build_store_url(
                        evolve(services.postgres, port=self.wire(services.postgres.port).port), name
                    )

    def faulty(self, service_url: str) -> str:
        """Return the address of a proxy for this service, which produces the fault of a stream or table."""
        proxy = self.stack.enter_context(faulty_line(service_url))
        self.line = proxy if self.case.where in {"stream", "table"} else None
        return proxy.url

    def wire(self, port: int) -> FaultyWire:
        """Return a proxy for this port, which produces the case's fault."""
        # Opening an AMQP connection takes about eight responses. If each is only 2 s late, it still opens in time.
        delay_options = {"slow_seconds": 2.0} if self.case.source == "eventhubs" else {}
        wire = self.stack.enter_context(faulty_wire(port, **delay_options))
        self.line = wire
        return wire

    @property
    def client(self) -> "KinesisClient":
        if self.made is None:
            self.made = boto3.client("kinesis", region_name="eu-west-1", endpoint_url=self.services.kinesis)
        return self.made

    def create_stream(self, name: str) -> None:
        """Create a stream, and wait until it can be read."""
        self.client.create_stream(StreamName=name, ShardCount=1)
        waiter = self.client.get_waiter("stream_exists")
        waiter.wait(StreamName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 120})

    def delete_stream(self) -> None:
        self.client.delete_stream(StreamName=self.case.name)
        waiter = self.client.get_waiter("stream_not_exists")
        waiter.wait(StreamName=self.case.name, WaiterConfig={"Delay": 1, "MaxAttempts": 120})

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run one of our commands to its end."""
        return subprocess.run([*LEASEHOLD, *words], capture_output=True, text=True, timeout=240, check=False)

    def start(self) -> None:
        if self.case.where == "clock":
            (self.folder / "sitecustomize.py").write_text(CLOCK)
        self.worker = self.started(self.folder, "w-1")

    def started(self, folder: Path, name: str, *more_arguments: str) -> "subprocess.Popen[bytes]":
        """Start a worker whose handler is in this folder."""
        env = {**os.environ, **self.env, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        handler = "shape:handle_async" if self.case.where == "async" else "shape:handle"
        arguments = ["consume", self.source, "--store", self.url, "--handler", handler, "--worker", name]
        arguments += ["--from", "TRIM_HORIZON", "--lease-seconds", f"{LEASE_SECONDS:g}", "--verbose"]
        arguments += ["--dead-letter", f"file://{self.letters}"] if self.case.where == "letter" else []
        arguments += more_arguments
        with (folder / "worker.log").open("ab") as log:
            return subprocess.Popen([*LEASEHOLD, *arguments], stderr=log, stdout=log, env=env)

    @property
    def letters(self) -> Path:
        return self.folder / "letters"

    def mode(self, behavior: str) -> None:
        """Set the handler's behavior in a file. The file is replaced, so the handler never reads half of it."""
        (self.folder / "next").write_text(behavior)
        (self.folder / "next").replace(self.folder / "mode")

    def send(self, data: str) -> None:
        """Send one more record. If the service is stopped, the record is not sent, and the error is ignored."""
        with suppress(OSError, ClientError):
            if self.table_streams is not None:
                self.table_streams.put("k", {"data": {"S": f"{data} {len(self.put)}"}})
                (shard,) = self.table_streams.shards.values()
                self.put.append((int(shard.rows[-1]["dynamodb"]["SequenceNumber"]), time.time()))
            elif self.case.source == "kinesis":
                response = self.client.put_record(StreamName=self.case.name, Data=data.encode(), PartitionKey="k")
                self.put.append((int(response["SequenceNumber"]), time.time()))
            elif self.case.how != "silent" or not self.said:
                assert self.hubs is not None
                self.hubs.put("orders", "0", [data])
                self.put.append((len(self.put), time.time()))

    def look(self) -> WatchedTable | None:
        """Read the table once, without having watched it before."""
        try:
            if self.table_store is None:
                self.table_store = open_store(self.store, create=False)
            return TableWatch(self.table_store, LEASE_SECONDS, 50.0).look()
        except (StoreError, ValueError):
            return None

    def age(self, table: WatchedTable) -> float:
        """Return the seconds since the first unacknowledged record was put."""
        checkpoint = table.leases[0].checkpoint
        checkpointed_number = int(checkpoint.sequence) if checkpoint.numbered else -1
        return time.time() - next(
            (put_time for sequence_number, put_time in self.put if sequence_number > checkpointed_number), time.time()
        )

    def until(self, condition: Callable[[WatchedTable], bool], seconds: float) -> tuple[float, WatchedTable | None]:
        """Send a record and look, repeatedly, until the condition holds or time is up.

        Returns the seconds that passed (infinity if the condition never held) and the last table.
        """
        started_at, table = time.monotonic(), None
        while (elapsed_seconds := time.monotonic() - started_at) < seconds:
            self.send("x")
            table = self.look() or table
            if table is not None and table.leases and condition(table):
                return elapsed_seconds, table
            time.sleep(STEP_SECONDS)
        return float("inf"), table

    def served(self, key: str, status: str) -> list[str]:
        """Return the differences between `leases` and `serve`, including its metrics and the alarms on them."""
        command = (*LEASEHOLD, "serve", self.store, "--port", "0")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serve:
            try:
                assert serve.stdout is not None
                url = urlsplit(serve.stdout.readline().partition(" ")[0])

                def get(path: str) -> bytes:
                    connection = HTTPConnection(url.hostname or "", url.port, timeout=30)
                    with closing(connection):
                        connection.request("GET", path)
                        return connection.getresponse().read()

                deadline = time.monotonic() + 60
                while not json.loads(get("/readyz"))["ok"] and time.monotonic() < deadline:
                    time.sleep(0.2)
                (group,) = json.loads(get("/healthz"))["groups"]
                metrics = get("/metrics").decode()
            finally:
                serve.terminate()
        differences = [] if group["status"] == status else [f"/healthz: {group}"]
        match = re.search(rf'leasehold_lease_status{{[^}}]*lease="{re.escape(key)}"}} (\S+)', metrics)
        status_number = None if match is None else float(match[1])
        if status_number != NUMBERS[status]:
            differences.append(f"/metrics: {status_number}")
        rules = (ROOT / "docs/alarms/prometheus.yml").read_text()
        above, equal = (int(re.search(rule, rules)[1]) for rule in ALARMS.values())  # type: ignore[index]
        firing_alarms = [
            name
            for name, is_firing in zip(ALARMS, ((status_number or 0) > above, status_number == equal), strict=True)
            if is_firing
        ]
        expected_alarms = (
            ["LeaseholdNotRead"] if NUMBERS[status] > NUMBERS["BEHIND"] else ["LeaseholdBehind"] * (status == "BEHIND")
        )
        return differences if firing_alarms == expected_alarms else [*differences, f"alarms: {firing_alarms}"]

    def fault(self) -> None:  # noqa: C901  one branch for each fault
        self.said = "begun"
        if self.case.how in {"deleted", "recreated"}:
            self.delete_stream()
            self.put.clear()
            if self.case.how == "recreated":
                self.create_stream(self.case.name)
        elif self.line is not None:
            self.line.set(self.case.how)
        elif self.case.where == "other":
            self.create_stream(f"{self.case.name}-2")
        elif self.case.where in {"handler", "async"}:
            self.mode(self.case.how)
            if self.case.how == "poison":
                self.send("poison")
        elif self.case.where == "letter":
            if self.case.how == "full":
                self.limit_files(1)
            else:
                self.letters.rmdir()
            self.mode("poison")
            self.send("poison")
        elif self.case.how == "locked" and self.case.store == "postgres":
            assert self.services.postgres is not None
            import psycopg  # noqa: PLC0415  from an extra

            self.lock = psycopg.connect(build_conninfo(self.services.postgres))
            self.lock.execute("LOCK TABLE leases_table_locked IN SHARE MODE")  # reads are allowed, writes wait
        elif self.case.how == "locked":
            self.lock = sqlite3.connect(self.folder / "leases.db", isolation_level=None, check_same_thread=False)
            self.lock.execute("BEGIN IMMEDIATE")
        elif self.case.where == "clock":
            (self.folder / "step").write_text(str(CLOCK_STEPS[self.case.how]))
        elif self.case.where == "pair":
            (other_folder := self.folder / "other").mkdir()
            (other_folder / "shape.py").write_text(HANDLER)
            (other_folder / "mode").write_text("well")
            self.other = self.started(other_folder, "w-2")
            self.mode(self.case.how)
        elif self.case.where == "disk" and self.worker is not None:
            self.limit_files(1)
        elif self.case.how == "stopped" and self.worker is not None:
            self.worker.send_signal(signal.SIGSTOP)
        elif self.case.where == "worker" and self.worker is not None:
            self.worker.kill()
            self.worker.wait()
        else:
            assert self.hubs is not None
            os.killpg(self.hubs.service.pid, signal.SIGSTOP)

    def limit_files(self, size: int) -> None:
        """Make the worker's writes fail beyond this file size, as on a full disk."""
        assert self.worker is not None
        resource.prlimit(self.worker.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def heal(self) -> None:
        if not self.said:
            return
        if self.case.how in {"deleted", "recreated"}:
            self.read_new_stream()
        elif self.line is not None:
            self.line.set("")
        elif self.case.where in {"handler", "async", "pair"}:
            self.mode("well")
        elif self.case.where == "letter":
            if self.case.how == "full":
                self.limit_files(resource.RLIM_INFINITY)
            else:
                self.letters.mkdir()
        elif self.lock is not None:
            self.lock.close()
        elif self.case.where == "clock":
            (self.folder / "step").unlink()
        elif self.case.where == "disk":
            self.limit_files(resource.RLIM_INFINITY)
            self.mode("well")
        elif self.case.how == "stopped" and self.worker is not None:
            self.worker.send_signal(signal.SIGCONT)
        elif self.case.where == "worker":
            self.start()
        elif self.hubs is not None:
            os.killpg(self.hubs.service.pid, signal.SIGCONT)
        self.said = ""

    def read_new_stream(self) -> None:
        """Restart the worker as the runbook says, after the stream exists again."""
        if self.case.how == "deleted":
            self.create_stream(self.case.name)
        assert self.worker is not None
        self.worker.terminate()
        self.worker.wait(30)
        self.worker = self.started(self.folder, "w-1", "--if-recreated", "TRIM_HORIZON")

    def refused(self) -> list[str]:
        """Start a worker of another stream on this table, and return an error unless it refuses the table."""
        stream_name, other_stream_name = self.case.name, f"{self.case.name}-2"
        command = (
            "consume",
            self.source.replace(stream_name, other_stream_name, 1),
            "--store",
            self.url,
            "--handler",
            "builtins:print",
        )
        completed = self.command(*command, "--worker", "w-2")
        names_both_streams = other_stream_name in completed.stderr and stream_name in completed.stderr.replace(
            other_stream_name, ""
        )
        return (
            []
            if completed.returncode == 1 and names_both_streams
            else [f"a worker on another stream: {completed.returncode} {completed.stderr}"]
        )

    def works(self, table: WatchedTable) -> bool:
        """Return whether the worker has read the stream and its status is OK."""
        # A reader never reaches the tip of a table's stream while the table is written constantly.
        has_checkpoint = self.table_streams is not None and table.leases[0].checkpoint.numbered
        return table.status.ok and (has_checkpoint or any(lag.end for lag in table.lags.values()))

    def run(self) -> tuple[str, list[str]]:
        """Run the trial, and return its row of the printed table and its failures."""
        with self.stack:
            return self.tried()

    def tried(self) -> tuple[str, list[str]]:  # noqa: PLR0915  the steps of a trial, in their order
        self.prepare()
        self.start()
        errors = list[str]()
        try:
            start_seconds, table = self.until(self.works, START_SECONDS)
            if start_seconds == float("inf"):
                log = (self.folder / "worker.log").read_text()[-600:]
                return f"{self.case.name}: never OK: {table and table.status}", [f"{self.case.name}: {log}"]
            self.fault()
            errors += self.refused() if self.case.where == "other" else []
            if self.case.where == "worker":
                time.sleep(
                    RETRIED_RENEWAL_FRACTION * LEASE_SECONDS
                )  # a renewal is overdue by now, so no command says OK any more
                early_check = self.command("leases", self.store, "--check")
                errors += (
                    [] if early_check.returncode else [f"OK after a kill: {early_check.stdout}{early_check.stderr}"]
                )
            must_stay_ok = self.case.words == OK
            # A lease whose owner has missed a renewal is UNKNOWN before it is an ORPHAN.
            shown_seconds, table = self.until(
                lambda table: not table.status.ok if must_stay_ok else table.status.word in self.case.words,
                QUIET_SECONDS if must_stay_ok else FAULT_SHOWN_SECONDS,
            )
            assert table is not None
            if must_stay_ok != (shown_seconds == float("inf")) and self.case.where != "pair":
                errors.append(f"{table.status} after {shown_seconds:.0f} s")
            if self.case.where == "pair":
                shown_seconds, table = self.until(
                    lambda table: table.status.ok and table.leases[0].owner == "w-2", FAULT_SHOWN_SECONDS
                )
                if shown_seconds == float("inf"):
                    errors.append(f"the other worker did not take it: {table and table.leases}")
                assert table is not None
            age = self.age(table)
            checked = self.command("leases", self.store, "--check", "--json")
            listing = json.loads(checked.stdout)
            key = listing["leases"][0]["key"]
            lag = listing["lags"].get(key, {}).get("seconds", 0.0)
            explained = self.command("explain", self.store, "--lease", key, "--for", "1s", "--json")
            status = listing["status"]
            if status not in self.case.words or not re.search(self.case.cause, listing["says"]):
                errors.append(f"leases: {status}: {listing['says']}")
            # The watch of `explain` may see a renewal of the worker whose clock went back; a single look cannot.
            allowed_statuses = {status, "OK"} if self.case.where == "clock" else {status}
            explanation = json.loads(explained.stdout)
            if explanation["status"] not in allowed_statuses:
                errors.append(f"explain: {explanation['status']}: {explanation['says']}; leases: {status}")
            later_lag = explanation["lag"]
            # After SILENT_SECONDS of silence, the lag becomes a lower bound. This may happen between the two commands.
            became_lower_bound = lag <= SILENT_SECONDS < later_lag.get("seconds", 0.0)
            if not became_lower_bound and later_lag.get("at_least") != listing["lags"].get(key, {}).get("at_least"):
                errors.append(f"explain: {explained.stdout[-300:]}; leases: {listing['lags']}")
            if checked.returncode != NUMBERS[status]:
                errors.append(f"exit status {checked.returncode}")
            errors += self.served(key, status)
            # The last response without records may have been on its way when the record was put.
            if not must_stay_ok and lag < age - RESPONSE_SECONDS:
                errors.append(f"lag {lag:.1f} below the age {age:.1f}")
            self.heal()
            recovery_seconds, table = self.until(lambda table: table.status.ok, 120)
            # A lease that was put aside is taken again after a minute, since there is no other worker.
            log = (self.folder / "worker.log").read_text()  # the log is incomplete if the disk was full
            aside = "put it aside" in listing["says"] or re.search("not taken again|leaving its leases to others", log)
            recovery_limit = RECOVERY_SECONDS + (ASIDE_SECONDS if aside else 0.0)
            recovery_limit += RESTART_SECONDS if self.case.how in {"killed", "deleted", "recreated"} else 0.0
            recovery_limit += UNANSWERED_SECONDS if (self.case.store, self.case.how) == ("postgres", "locked") else 0.0
            if recovery_seconds > recovery_limit:
                errors.append(f"not OK again: {table and table.status}")
        finally:
            with suppress(OSError):
                self.heal()
            for process in (self.worker, self.other):
                if process is not None:
                    process.kill()
                    process.wait()
            if self.table_store is not None:
                self.table_store.close()
        summary_line = f"{self.case.name:34} {status:8} after {shown_seconds:5.0f} s, lag {lag:6.1f} age {age:6.1f}, "
        summary_line += f"OK after {recovery_seconds:3.0f} s: {listing['says']}"
        return summary_line, [f"{self.case.name}: {error}" for error in errors]


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """Start the services that the cases need, if this machine has them."""
    with ExitStack() as stack:
        database = None
        with suppress(ServiceError):
            database = stack.enter_context(run_postgres())
        gcs = ""
        with suppress(ServiceError):
            gcs = stack.enter_context(fake_gcs()).url
        kinesis, dynamodb = stack.enter_context(run_kinesis_local()), stack.enter_context(run_dynalite())
        blobs, objects = stack.enter_context(run_azurite()), stack.enter_context(run_moto())
        stack.enter_context(patch.dict(os.environ, {CONNECTION_STRING_VARIABLE: azurite_connection_string(blobs)}))
        yield Services(stack, kinesis.url, dynamodb.url, database, blobs, objects.url, gcs)


@pytest.mark.timeout(3600)  # the trials wait for minutes, and share two processors
def test_the_status_of_every_fault_names_it_and_is_ok_again_afterwards(
    services: Services, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A minute after a fault, the status names its cause, and the lag is at least the oldest record's age."""
    pattern = os.environ.get("STATUS_CASES")
    possible_cases = [case for case in CASES if services.have(case)]
    cases = (
        possible_cases[::5] if pattern is None else [case for case in possible_cases if re.search(pattern, case.name)]
    )

    def run(case: Case) -> list[str]:
        (folder := tmp_path / case.name).mkdir()
        try:
            summary_line, errors = Trial(case, services, folder).run()
        except (OSError, subprocess.SubprocessError) as fault:  # the other trials continue
            summary_line, errors = f"{case.name}: {fault}", [f"{case.name}: {fault}"]
        with capsys.disabled():
            print(summary_line, *errors, sep="\n    ", flush=True)  # noqa: T201  printing the table is the purpose of this run
        return errors

    with ThreadPoolExecutor(PARALLEL_TRIALS) as pool:
        results = list(pool.map(run, cases))
    failed_cases = [case for case, errors in zip(cases, results, strict=True) if errors]
    failures = [errors for case in failed_cases for errors in run(evolve(case, suffix="-again"))]
    assert sorted(failures) == []
