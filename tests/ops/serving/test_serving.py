"""Tests that the read-only server shows the table, exports metrics, and rejects forbidden requests."""

import http.client
import json
import math
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import uvicorn
from attrs import evolve
from served_tables import EVIL, Table, held
from typer.testing import CliRunner
from waiters import Clock

from leasehold.adapters.cli.steer import serve
from leasehold.adapters.cli.steer.serve import app
from leasehold.adapters.ops.serving.app import BoundedConnection, prometheus_text, saved_page, server
from leasehold.adapters.ops.serving.watcher import FleetRecord, LagPoint, TableWatcher, ViewRequest
from leasehold.adapters.ops.watching import SeenMove
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.config import Config
from leasehold.balancer.model import SHARD_END, Lease
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.embedded.sqlite import SqliteStore
from leasehold.stores.protocol import Listing
from leasehold.stores.writes import AnnotateLease, ReleaseLease, StealLease
from leasehold_lab.contract.actors import create_lease_with_owner, expect_applied

ALL = ViewRequest(most=sys.maxsize)


@pytest.fixture
def store() -> Table:
    """Return a table with two workers, one of which is far behind. The key of one lease contains markup."""
    table = Table()
    rows = [held("s-0", "a", 12.5, 3), held("s-1", "a"), held("s-2", "a"), held("s-3", "b"), held(EVIL, "b")]
    for row in rows:
        create_lease_with_owner(table, row)
    create_lease_with_owner(table, Lease("s-9", checkpoint=SHARD_END))
    return table


@pytest.fixture
def watcher(store: Table) -> TableWatcher:
    """Return a watcher that has read the table once."""
    table_watcher = TableWatcher("memory://x", store, Config(), FleetRecord(), every=60.0)
    table_watcher.look()
    return table_watcher


@pytest.fixture
def port(watcher: TableWatcher) -> Iterator[int]:
    config = uvicorn.Config(
        server([watcher], ["127.0.0.1", "localhost"]), port=0, log_level="error", lifespan="off", http=BoundedConnection
    )
    listening_socket = config.bind_socket()
    listening_socket.listen()
    page_server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: page_server.run(sockets=[listening_socket]))
    thread.start()
    yield listening_socket.getsockname()[1]
    page_server.should_exit = page_server.force_exit = True
    thread.join()
    listening_socket.close()


def fetch(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Send a request, and return the status, the headers and the text of the response."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()


def test_the_json_contains_owners_and_lag(port: int) -> None:
    (table,) = json.loads(fetch(port, "/leases.json")[2])
    totals = {name: table["total"][name] for name in ("leases", "finished", "workers", "not_ok", "lag_max", "moves")}
    assert totals == {"leases": 5, "finished": 1, "workers": 2, "not_ok": 0, "lag_max": 12.5, "moves": 0}
    assert [(worker_row["worker"], worker_row["leases"], worker_row["target"]) for worker_row in table["workers"]] == [
        ("a", 3, 3),
        ("b", 2, 2),
    ]
    first_lease = next(lease for lease in table["leases"] if lease["key"] == "s-0")
    assert (
        first_lease["owner"],
        first_lease["lag"]["seconds"],
        first_lease["lag"]["host"],
        first_lease["lag"]["moves"],
    ) == (
        "a",
        12.5,
        "vm-7",
        3,
    )


def test_a_move_is_shown_with_its_rule(store: Table, watcher: TableWatcher, port: int) -> None:
    (row,) = store.get(["s-0"])
    expect_applied(store.write(StealLease(row, "c")))
    watcher.look()
    (table,) = json.loads(fetch(port, "/leases.json")[2])
    assert [move[1:] for move in table["moves"]] == [["s-0", "a", "c", "H2"]]
    expect_applied(store.write(ReleaseLease(evolve(row, owner="c"), "c")))
    watcher.look()
    (table,) = json.loads(fetch(port, "/leases.json")[2])
    assert table["moves"][0][1:] == ["s-0", "c", None, ""]
    assert (table["total"]["unowned"], table["total"]["not_ok"], table["total"]["moves"]) == (1, 0, 2)


def test_the_lag_curve_has_a_point_for_each_read_with_lags(watcher: TableWatcher, port: int) -> None:
    assert "polyline" not in fetch(port, "/lag.svg")[2], "one point is no curve"
    watcher.look()
    watcher.look()
    status, headers, text = fetch(port, "/lag.svg?table=0")
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    (points,) = re.findall(r'<polyline points="([^"]*)"', text)
    assert len(points.split()) == len(watcher.state()["lag"]) == 3
    assert [fetch(port, f"/lag.svg?table={number}")[0] for number in ("7", "x")] == [404, 404]


def test_explanations_are_those_of_the_command(port: int) -> None:
    lease = json.loads(fetch(port, "/explain?lease=s-3")[2])
    assert lease["should"].startswith("b: it holds 2 where its share is 2")
    worker = json.loads(fetch(port, "/explain?worker=a")[2])
    assert [(worker_row["worker"], worker_row["share"]) for worker_row in worker["workers"]] == [("a", 3)]
    assert [
        fetch(port, f"/explain?{query}")[0]
        for query in ("lease=none", "worker=none", "table=7", "table=x", "table=" + "9" * 5000)
    ] == [404] * 5


def test_health_follows_the_table(store: Table, watcher: TableWatcher, port: int) -> None:
    """If the table cannot be read, the server is unhealthy, so no one mistakes an old page for the current state."""
    assert [fetch(port, path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    store.down = True
    watcher.start()
    while not watcher.last_state.trouble:
        time.sleep(0.01)  # the thread reads the table at once, and then notifies the pages
    status, _, text = fetch(port, "/healthz")
    expected_group = {"store": "memory://x", "status": "UNKNOWN", "says": "the table cannot be read: the line is down"}
    assert (status, json.loads(text)) == (503, {"ok": False, "groups": [expected_group]})
    status, _, text = fetch(port, "/readyz")
    assert (status, json.loads(text)) == (503, {"ok": False, "stale": ["memory://x"]})
    metrics = fetch(port, "/metrics")[2]
    assert 'leasehold_up{store="memory://x"} 0\n' in metrics
    assert 'leasehold_status{store="memory://x"} 3\n' in metrics
    assert json.loads(fetch(port, "/leases.json")[2])[0]["trouble"] == "the line is down"
    watcher.close()


def test_metrics_cover_every_lease_and_the_fleet(port: int) -> None:
    """The key of a lease cannot inject a line into the metrics."""
    text = fetch(port, "/metrics")[2]
    store = 'store="memory://x"'
    for line in (
        f"leasehold_lag_max_seconds{{{store}}} 12.5",
        f'leasehold_lease_lag_seconds{{{store},lease="s-0"}} 12.5',
        f"leasehold_lag_is_lower_bound{{{store}}} 0",
        f'leasehold_lease_lag_is_lower_bound{{{store},lease="s-0"}} 0',
        f'leasehold_lease_kilobytes_per_second{{{store},lease="s-3"}} 2',
        f'leasehold_worker_target{{{store},worker="a"}} 3',
        f"leasehold_owner_changes_total{{{store}}} 0",
        f'leasehold_lease_status{{{store},lease="<b>x</b>\\"\\\\\\n"}} 0',
    ):
        assert f"{line}\n" in text
    assert all(line.startswith(("#", "leasehold_")) for line in text.splitlines())


def test_metrics_show_whether_a_lag_is_a_lower_bound() -> None:
    table, now = Table(), time.time()
    old_progress = Progress(now, "a", behind=90.0, read=now - 90.0)
    create_lease_with_owner(table, Lease("s-0", owner="a", annotations=((PROGRESS_ANNOTATION, old_progress.note),)))
    create_lease_with_owner(table, held("s-1", "a"))
    create_lease_with_owner(table, Lease("s-2", owner="java"))
    watcher = TableWatcher("memory://x", table, Config(), FleetRecord(), every=60.0)
    watcher.look()
    lines = prometheus_text([(watcher.state(), True)]).splitlines()
    bounds = [line.replace('store="memory://x"', "") for line in lines if "lower_bound{" in line]
    assert bounds == [
        "leasehold_lag_is_lower_bound{} 1",
        'leasehold_lease_lag_is_lower_bound{,lease="s-0"} 1',
        'leasehold_lease_lag_is_lower_bound{,lease="s-1"} 0',
    ], "of a lag that is not known, nothing is told"


def test_a_foreign_host_header_is_rejected(port: int) -> None:
    """A foreign web page cannot read the fleet's data through a host name that it resolves to this machine."""
    assert fetch(port, "/leases.json", Host="evil.example")[0] == 400
    assert fetch(port, "/leases.json", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/", "/page.css", "/page.js", "/leases.json", "/lag.svg", "/explain?lease=s-3", "/metrics"]
)
def test_the_server_writes_no_row_and_fetches_no_foreign_file(port: int, path: str) -> None:
    status, headers, text = fetch(port, path)
    assert (status, headers["content-security-policy"].split(";")[0]) == (200, "default-src 'none'")
    assert "https://" not in text
    assert fetch(port, path, "POST")[0] == 405


def test_a_page_receives_an_event_after_each_read(store: Table, watcher: TableWatcher, port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", "/events")
        response = connection.getresponse()
        first_event = json.loads(response.readline().removeprefix(b"data: "))
        response.readline()
        create_lease_with_owner(store, held("s-7", "c"))
        watcher.look()
        second_event = json.loads(response.readline().removeprefix(b"data: "))
    assert [len(event[0]["leases"]) for event in (first_event, second_event)] == [6, 7]


def read_first_event(port: int, query: str) -> tuple[dict[str, Any], int]:
    """Request a view, and return its first event and the event's size in bytes."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", f"/view{query}")
        line = connection.getresponse().readline()
    return json.loads(line.removeprefix(b"data: ")), len(line)


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ("", ["s-0", EVIL, "s-1"]),
        ("?sort=key&down=", ["s-9", "s-3", "s-2"]),
        ("?sort=key&most=1", [EVIL]),
        ("?sort=key&text=B", [EVIL, "s-3", "s-9"]),
        ("?sort=lag&text=s-1", ["s-1"]),
    ],
)
def test_a_page_receives_the_first_leases_in_its_order(port: int, query: str, keys: list[str]) -> None:
    """A lease with a problem is not listed after a thousand healthy ones."""
    event, _ = read_first_event(port, query)
    assert [row["key"] for row in event["rows"]][:3] == keys
    assert [group["store"] for group in event["groups"]] == ["memory://x"]


@pytest.mark.parametrize("query", ["?sort=colour", "?most=-1", "?most=20001", "?table=1"])
def test_an_unknown_view_is_rejected(port: int, query: str) -> None:
    status, _, body = fetch(port, f"/view{query}")
    assert status == 404
    assert json.loads(body)["error"].split(":")[0] in {"most", "table"}


def test_an_event_does_not_grow_with_the_number_of_leases(store: Table, watcher: TableWatcher, port: int) -> None:
    """A table with a thousand leases gives a small event by default. It used to have 230,000 bytes."""
    for number in range(1000):
        create_lease_with_owner(
            store, held(f"shardId-{number:012}", f"worker-{number % 50}.example", float(number), number)
        )
    watcher.look()
    assert read_first_event(port, "")[1] <= 10_000
    event, size = read_first_event(port, "?most=100")
    assert (event["found"], len(event["rows"]), len(event["workers"])) == (1006, 100, 50)
    assert size <= 20_000


def test_a_page_distinguishes_no_lag_from_an_unknown_lag(port: int) -> None:
    """A lag of zero does not look like the unknown lag of a lease whose owner is silent."""
    lags = {row["key"]: row.get("seconds") for row in read_first_event(port, "?sort=key")[0]["rows"]}
    assert (lags["s-0"], lags["s-1"], lags["s-9"]) == (12.5, 0.0, None)


def test_the_lag_curve_of_a_lease_is_drawn_from_its_reads(store: Table, watcher: TableWatcher, port: int) -> None:
    assert "polyline" not in fetch(port, "/lag.svg?lease=s-0")[2]
    for lag_seconds in (20.0, 30.0):
        name, value = held("s-0", "a", lag_seconds).annotations[0]
        expect_applied(store.write(AnnotateLease(store.get(["s-0"])[0], name, value)))
        watcher.look()
    (curve,) = re.findall(r'<polyline points="([^"]+)"', fetch(port, "/lag.svg?lease=s-0")[2])
    heights = [float(point.split(",")[1]) for point in curve.split()]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 3
    assert "polyline" not in fetch(port, "/lag.svg?lease=nobody")[2]


def test_the_history_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "moves.db")
    record = FleetRecord(path)
    record.add("x", (SeenMove(5.0, "s-0", "a", None), SeenMove(6.0, "s-0", None, "b", "M6")), LagPoint(6.0, 1.5, 2.5))
    record.close()
    reopened = FleetRecord(path)
    assert [(move.after, move.rule) for move in reopened.moves("x")] == [("b", "M6"), (None, "")]
    assert (reopened.lag("x"), reopened.count("x"), reopened.count("y")) == ((LagPoint(6.0, 1.5, 2.5),), 2, 0)
    reopened.add("x", (), LagPoint(6.0 + 8 * 86400, 0.0, 0.0))
    assert (reopened.count("x"), len(reopened.lag("x"))) == (0, 1)
    reopened.close()


def test_an_unread_table_has_no_metrics() -> None:
    """Values that were never measured are left out, because a zero would prevent an alarm."""
    unread = TableWatcher("x", MemoryStore(), Config(), FleetRecord(), every=1.0)
    lines = prometheus_text([(unread.state(), unread.is_fresh)]).splitlines()
    assert [line for line in lines if line[0] != "#"] == ['leasehold_up{store="x"} 0', 'leasehold_status{store="x"} 3']


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    """The command serves the page at the URL that it prints, and leaves no port open."""
    table = SqliteStore(str(tmp_path / "l.db"))
    create_lease_with_owner(table, held("s-0", "a"))
    table.close()
    command = (
        "serve",
        f"sqlite://{tmp_path}/l.db",
        "--port",
        "0",
        "--every",
        "0.1",
        "--history",
        str(tmp_path / "h.db"),
    )
    with subprocess.Popen(
        (sys.executable, "-m", "leasehold.adapters.cli.main", *command),
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as serve_process:
        assert serve_process.stdout is not None
        port = int(serve_process.stdout.readline().partition("/ (")[0].rpartition(":")[2])
        document: dict[str, Any] = {}
        while not document.get("leases"):
            (document,) = json.loads(fetch(port, "/leases.json")[2])
        serve_process.send_signal(signal.SIGINT)
        assert serve_process.wait(30) == 0
    assert document["store"] == f"sqlite://{tmp_path}/l.db"


def test_ctrl_c_right_after_the_start_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who presses Ctrl-C when the address appears neither waits forever nor sees a traceback."""
    SqliteStore(str(tmp_path / "l.db")).close()
    printed_lines: list[str] = []

    def print_and_interrupt(text: str, *, flush: bool) -> None:
        printed_lines.append(text)
        assert flush
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("leasehold.adapters.cli.steer.serve.print", print_and_interrupt, raising=False)
    result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "--port", "0"])
    assert (result.exit_code, result.output, len(printed_lines)) == (0, "", 1)
    assert "leasehold-page" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["nowhere://x"], 2, "unknown scheme"),
        (["sqlite://{}/none.db"], 1, "there is no file"),
        (["sqlite://{}/none.db", "--source", "kinesis://a", "--source", "kinesis://b"], 2, "--source: give one"),
        (["sqlite://{}/none.db", "--history", "{}/none/h.db"], 1, "--history:"),
    ],
)
def test_a_page_that_cannot_be_served_is_reported_in_one_line(
    tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    result = CliRunner().invoke(app, [argument.format(tmp_path) for argument in arguments])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (status, "", 1)
    assert says in result.stderr


def test_a_port_in_use_is_reported_with_the_option_to_change(tmp_path: Path) -> None:
    SqliteStore(str(tmp_path / "l.db")).close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "--port", str(port)])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"--port {port}: Address already in use" in result.stderr
    assert "0 takes a free one" in result.stderr


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="NO PAGE AT :: IS TRIED: this machine has no IPv6")
def test_a_page_at_every_address_is_reachable_by_ipv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(str(tmp_path / "l.db")).close()
    reached_ports: list[int] = []

    def connect_and_interrupt(text: str, *, flush: bool) -> None:
        assert flush
        port = int(text.partition("/ (")[0].rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), 10).close()
        reached_ports.append(port)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("leasehold.adapters.cli.steer.serve.print", connect_and_interrupt, raising=False)
    result = CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", "--host", "::", "--port", "0"])
    assert (result.exit_code, len(reached_ports)) == (0, 1)


def test_a_locked_history_neither_stops_reads_nor_loses_moves(store: Table, tmp_path: Path) -> None:
    """The watcher must survive an error of the history. Otherwise, the page would show old data as if it were new."""
    path = tmp_path / "moves.db"
    with (
        closing(FleetRecord(str(path))) as record,
        closing(sqlite3.connect(path, isolation_level=None)) as locking_connection,
    ):
        watcher = TableWatcher("memory://x", store, Config(), record, every=60.0)
        watcher.look()
        locking_connection.execute("BEGIN EXCLUSIVE")
        row = next(lease for lease in store.list().leases if lease.key == "s-0")
        stolen_lease = expect_applied(store.write(StealLease(row, "b")))
        watcher.look()
        locked_state = watcher.state()
        assert (locked_state["trouble"], watcher.is_fresh) == (
            "the history cannot be used now: database is locked",
            True,
        )
        assert (
            next(served_lease["owner"] for served_lease in locked_state["leases"] if served_lease["key"] == "s-0")
            == "b"
        )
        expect_applied(store.write(ReleaseLease(stolen_lease, "b")))
        watcher.look()
        locking_connection.execute("ROLLBACK")
        watcher.look()
        current_state = watcher.state()
        assert (current_state["trouble"], current_state["total"]["moves"]) == ("", 2)
        assert sorted((move[2], move[3]) for move in current_state["moves"]) == [("a", "b"), ("b", None)]
        watcher.look()
        assert watcher.state()["total"]["moves"] == 2, "each move is written once"


def test_a_slowly_read_table_is_fresh_between_two_reads(store: Table) -> None:
    clock = Clock()
    watcher = TableWatcher("memory://x", store, Config(), FleetRecord(), every=60.0, wall=clock)
    watcher.look()
    clock.now += watcher.every
    assert watcher.is_fresh
    clock.now += 100 * watcher.every
    assert not watcher.is_fresh


class Odd(Table):
    """A table whose first reads raise exceptions that a store must not raise."""

    faults: tuple[BaseException, ...] = (MemoryError(), ZeroDivisionError("odd"))

    def list(self) -> Listing:
        """Raise the next fault, or list the leases if no faults are left."""
        if self.faults:
            fault, *remaining_faults = self.faults
            self.faults = tuple(remaining_faults)
            raise fault
        return super().list()


def test_a_watcher_survives_any_exception_of_a_read() -> None:
    looked = TableWatcher("memory://x", Odd(), Config(), FleetRecord(), every=0.01)
    troubles = []
    looked.start()
    while looked.last_state.table is None:
        troubles.append(looked.last_state.trouble)
    looked.close()
    assert set(troubles) <= {"", "MemoryError", "ZeroDivisionError: odd"}
    assert looked.last_state.trouble == ""


def test_an_incomplete_request_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a complete request is closed, so that file descriptors do not run out."""
    monkeypatch.setattr("leasehold.adapters.ops.serving.app.REQUEST_SECONDS", 0.2)
    incomplete_requests = (
        b"",
        b"GET / HTTP/1.1\r\nHost: loc",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab",
    )
    for request in incomplete_requests:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as connection:
            connection.sendall(request)
            assert receive_until_closed(connection) == (b"" if len(request) < 40 else ANY)


def test_an_incomplete_second_request_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.ops.serving.app.REQUEST_SECONDS", 0.2)
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal")
        assert receive_until_closed(connection).startswith(b"HTTP/1.1 200")


def test_an_incomplete_request_after_a_response_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold.adapters.ops.serving.app.REQUEST_SECONDS", 0.2)
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        with suppress(ConnectionError):  # the time may already be over
            connection.sock.sendall(b"GET /heal")
        assert receive_until_closed(connection.sock) == b""


def test_connections_are_limited_and_a_later_request_is_served(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients cannot use up all file descriptors, because the process also needs some to read its tables."""
    monkeypatch.setattr("leasehold.adapters.ops.serving.app.CONNECTIONS_MAX", 5)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=30))) for _ in range(8)
        ]
        assert [receive_until_closed(connection) for connection in connections[5:]] == [b""] * 3
        for connection in connections[:5]:
            connection.close()
    while True:
        with suppress(OSError, http.client.HTTPException):
            assert fetch(port, "/healthz")[0] == 200
            return


def test_the_time_limit_spares_the_stream_of_an_open_page(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies only to requests, because an open page depends on a response that lasts for hours."""
    monkeypatch.setattr("leasehold.adapters.ops.serving.app.REQUEST_SECONDS", 0.1)
    with closing(socket.create_connection(("127.0.0.1", port), timeout=1.0)) as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises(TimeoutError):
            receive_until_closed(connection)


def receive_until_closed(connection: socket.socket) -> bytes:
    """Return the data that arrives until the other end closes or resets the connection."""
    received_data = b""
    with suppress(ConnectionError):
        while received_part := connection.recv(65536):
            received_data += received_part
    return received_data


def test_a_saved_page_contains_all_that_the_served_one_requests(watcher: TableWatcher) -> None:
    """The key of a lease cannot end the script element that contains the data."""
    page = saved_page([watcher])
    assert (page.count("<script"), page.count("</script>"), page.count("src="), page.count("stylesheet")) == (
        2,
        2,
        0,
        0,
    )
    data = json.loads(page.partition('id="saved">')[2].partition("</script>")[0])
    (table,), (group,) = data["tables"], data["groups"]
    assert group["store"] == "memory://x"
    assert [row["key"] for row in table["view"]["rows"]] == [row["key"] for row in watcher.view(ALL)["rows"]]
    assert table["lease"]["s-0"] == watcher.explain(None, "s-0")
    assert table["worker"] == {name: watcher.explain(name, None) for name in ("a", "b")}


def test_serve_once_writes_the_page_and_ends(tmp_path: Path) -> None:
    """A table that cannot be read leaves no page."""
    url, page = f"sqlite://{tmp_path}/leases.db", tmp_path / "page.html"
    with closing(SqliteStore(f"{tmp_path}/leases.db")) as store:
        create_lease_with_owner(store, Lease("s-9", checkpoint=SHARD_END))
    result = CliRunner().invoke(app, [url, "--once", str(page)])
    assert (result.exit_code, result.output) == (0, "")
    assert "s-9" in page.read_text(encoding="utf-8")
    for arguments, status, message in (
        ([url, "--once", str(tmp_path)], 2, "--once: "),
        ([f"sqlite://{tmp_path}/none.db", "--once", str(tmp_path / "none.html")], 1, "none.db"),
    ):
        rejected_result = CliRunner().invoke(app, arguments)
        assert (rejected_result.exit_code, message in rejected_result.output) == (status, True)
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize("known_after", [0.0, 30.0, math.inf])
def test_a_saved_page_waits_for_every_status_but_at_most_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_after: float
) -> None:
    """The statuses of all tables count."""
    clock, page = Clock(), tmp_path / "page.html"
    began_at = clock.now

    class SlowWatcher:
        def __init__(self, seconds: float) -> None:
            self.last_state, self.name, self.seconds = SimpleNamespace(table="read"), "orders", seconds

        def try_look(self) -> None:
            pass

        @property
        def all_statuses_known(self) -> bool:
            return clock.now - began_at >= self.seconds

    def sleep(seconds: float) -> None:
        clock.now += seconds
        assert clock.now - began_at < 1000.0

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    monkeypatch.setattr(serve, "saved_page", lambda _watchers: "page")
    watchers: Any = [SlowWatcher(0.0), SlowWatcher(known_after)]
    serve._write_pages_periodically(watchers, page, 2.0)  # noqa: SLF001  the command itself would take minutes
    assert clock.now - began_at == min(known_after, 120.0)
    assert page.read_text(encoding="utf-8") == "page"


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], set()),
        (["--host", "10.0.0.7"], {"10.0.0.7"}),
        (["--host", "10.0.0.7", "--allow-host", "fleet.test", "--allow-host", "b"], {"10.0.0.7", "fleet.test", "b"}),
    ],
)
def test_requests_may_name_this_machine_the_address_and_every_allowed_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], hosts: set[str]
) -> None:
    SqliteStore(str(tmp_path / "l.db")).close()
    allowed_hosts = set[str]()
    monkeypatch.setattr(serve, "_serve_pages", lambda *arguments: allowed_hosts.update(arguments[3]))
    assert CliRunner().invoke(app, [f"sqlite://{tmp_path}/l.db", *options]).exit_code == 0
    assert allowed_hosts == {"127.0.0.1", "localhost"} | hosts


def test_each_store_is_read_with_its_own_target_and_source_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose leases do not move has `-` for its target."""
    opened: list[tuple[str, str | None]] = []
    closed: list[str] = []
    shown: list[tuple[str, Any, float]] = []

    class NotedStore(MemoryStore):
        def close(self) -> None:
            closed.append("store")

    def open_noted(url: str, target_url: str | None) -> NotedStore:
        opened.append((url, target_url))
        return NotedStore()

    def open_source(url: str) -> SimpleNamespace:
        return SimpleNamespace(url=url, close=lambda: closed.append(url))

    def make_watcher(name: str, *_: object, every: float, source: SimpleNamespace) -> SimpleNamespace:
        shown.append((name, source.url, every))
        return SimpleNamespace(start=lambda: None, close=lambda: closed.append("watcher"))

    monkeypatch.setattr(serve, "open_for_reading", open_noted)
    monkeypatch.setattr(serve, "open_lag_source", open_source)
    monkeypatch.setattr(serve, "TableWatcher", make_watcher)
    monkeypatch.setattr(serve, "_serve_pages", lambda *_: None)
    stores, options = ["memory://a", "memory://b"], ["--source", "s-a", "--source", "s-b", "--every", "7s"]
    assert CliRunner().invoke(app, [*stores, *options, "--to", "-", "--to", "memory://c"]).exit_code == 0
    assert opened == [("memory://a", None), ("memory://b", "memory://c")]
    assert shown == [("memory://a", "s-a", 7.0), ("memory://b", "s-b", 7.0)]
    assert closed == ["watcher", "s-b", "store", "watcher", "s-a", "store"]
