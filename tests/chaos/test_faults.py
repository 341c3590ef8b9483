"""The parts of chaos runs work: schedules are repeatable, and connections fail as intended."""

import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
from attrs import fields_dict
from faulty_line import Refused
from fleet import HANDLER_FAULTS, NO_THREADS, WORKER_FAULTS
from grounds import ChaosHubStream, ChaosKinesisStream
from processes import find_client_at_port
from raising_log import ORDER, RAISED, RaisingLogHandler
from schedule import Fault, FaultKind, draw_schedule
from unsteady_line import HTTP_FAULTS, ONE_WAY, SLOW_SERVICE, Lines
from waiters import until
from wire import Wire

from leasehold_lab.standins.node import HOST

pytestmark = pytest.mark.slow

BUSY = Refused("ServerBusy", 503)

WORKERS = ("worker-1", "worker-2", "worker-3", "worker-4", "worker-5")
KINDS = (
    *WORKER_FAULTS,
    *HANDLER_FAULTS,
    NO_THREADS,
    FaultKind("pause", "store", common=True),
    FaultKind("parted", "store"),
)


def test_a_schedule_depends_only_on_its_seed() -> None:
    """A run that broke a law can be repeated."""
    assert draw_schedule(7, 300.0, KINDS, WORKERS) == draw_schedule(7, 300.0, KINDS, WORKERS)
    assert draw_schedule(7, 300.0, KINDS, WORKERS) != draw_schedule(8, 300.0, KINDS, WORKERS)
    first_fault = draw_schedule(7, 300.0, KINDS, WORKERS)[0]
    assert str(first_fault).startswith(first_fault.kind.what)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_fault_occurs_and_most_workers_are_spared(seed: int) -> None:
    """No fault is missing from a run, and some workers are always left to take over."""
    faults = draw_schedule(seed, 600.0, KINDS, WORKERS)
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 2
    assert all(fault.until < 600.0 and bool(fault.worker) != fault.kind.common for fault in faults)
    for fault in faults:
        current_faults = [
            current_fault for current_fault in faults if current_fault.at <= fault.at < current_fault.until
        ]
        workers = [current_fault.worker for current_fault in current_faults if current_fault.worker]
        assert len(workers) == len(set(workers)) <= 2
        assert sum(current_fault.kind.common for current_fault in current_faults) <= 1


def test_kinds_of_faults_have_distinct_names() -> None:
    for stream_class in (ChaosKinesisStream, ChaosHubStream):
        kinds: tuple[FaultKind, ...] = fields_dict(stream_class)["kinds"].default  # type: ignore[assignment]
        assert len({(kind.what, kind.line) for kind in kinds}) == len(kinds)
    assert str(Fault(1.0, FaultKind("parted", "store"), "worker-1", 4.0)) == "parted to the store of worker-1 for 4.0 s"


@contextmanager
def run_recording_service(request_paths: list[str]) -> Iterator[str]:
    """Run a service that adds the path of each request to `request_paths`."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            request_paths.append(self.path)
            self.send_response(201)
            self.send_header("ETag", '"7"')
            self.end_headers()

        def log_message(self, *_said: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def put(url: str, path: str, patience: float = 20.0) -> tuple[int, str | None]:
    """Send a PUT request over this line, and return the status and the ETag."""
    with closing(HTTPConnection(HOST, urlsplit(url).port, timeout=patience)) as connection:
        connection.request("PUT", path, b"body")
        response = connection.getresponse()
        return response.status, response.headers["ETag"]


def outcome(url: str, path: str, patience: float = 20.0) -> str:
    """Return the outcome of a PUT request in one word."""
    try:
        return str(put(url, path, patience)[0])
    except TimeoutError:
        return "silence"
    except ConnectionError:
        return "reset"


def test_a_condition_affects_one_workers_line_while_it_lasts() -> None:
    """A partition between one worker and the store does not affect other workers, and ends when its condition ends."""
    paths: list[str] = []
    with run_recording_service(paths) as service, Lines.laid(service, ("a", "b"), "seed", refusals=(BUSY,)) as lines:
        lines.begin("parted", "a")
        assert [outcome(lines.url(worker), f"/{worker}/1") for worker in "ab"] == ["reset", "201"]
        lines.end("parted", "a")
        assert put(lines.url("a"), "/a/2") == (201, '"7"')
        lines.begin("lost replies", "a")
        assert "reset" in {outcome(lines.url("a"), f"/lost/{number}") for number in range(20)}
    assert (paths[:2], len(paths)) == (["/b/1", "/a/2"], 22)
    assert 1 < lines.met < 22


def test_lines_support_every_condition_of_a_schedule() -> None:
    with run_recording_service([]) as service:
        outcomes = (
            "silence",
            "silence",
            "reset",
            "reset",
            "503",
            "201",
            "reset",
            "silence",
            "silence",
            "silence",
            "reset",
        )
        for condition, expected in zip((*HTTP_FAULTS, SLOW_SERVICE, *ONE_WAY), outcomes, strict=True):
            with Lines.laid(service, ("a",), condition, refusals=(BUSY,)) as lines:
                lines.begin(condition, "a")
                assert expected in {outcome(lines.url("a"), "/x", 0.1) for _ in range(20)}


def test_a_line_can_block_one_direction() -> None:
    """The service gets the requests whose responses are held back, but no requests that are held back themselves."""
    paths: list[str] = []
    with run_recording_service(paths) as service, Lines.laid(service, ("a",), "seed", refusals=(BUSY,)) as lines:
        for condition in ONE_WAY:
            lines.begin(condition, "a")
            assert outcome(lines.url("a"), f"/{condition.replace(' ', '-')}", 0.5) in {"silence", "reset"}
            lines.end(condition, "a")
        assert outcome(lines.url("a"), "/after") == "201"
        until(lambda: len(paths) == 3)
    assert set(paths) == {"/requests-only", "/writes-unanswered", "/after"}


def test_a_wire_can_block_one_direction() -> None:
    """Requests that were held back arrive late, as in a network that recovers."""
    paths: list[str] = []
    with run_recording_service(paths) as service:
        wire = Wire(int(service.rpartition(":")[2]), lambda _port: "a")
        by_wire = f"http://{HOST}:{wire.port}"
        wire.hold("a", requests=True, responses=False)
        assert outcome(by_wire, "/held", 0.5) == "silence"
        assert paths == []
        wire.let_through("a")
        until(lambda: paths == ["/held"])
        wire.hold("a", requests=False, responses=True)
        assert outcome(by_wire, "/unanswered", 0.5) == "silence"
        until(lambda: paths == ["/held", "/unanswered"])
        wire.cut()


def test_logging_raises_while_the_fault_is_active(tmp_path: Path) -> None:
    """Both the filter and the handler of a user's program raise exceptions."""
    orders_path = tmp_path / "orders"
    orders_path.write_text(ORDER)
    log = logging.getLogger("leasehold.test_faults")
    raising_handler = RaisingLogHandler(orders_path)
    raising_handler.install()
    try:
        raised_in = set()
        for _ in range(2 * len(RAISED)):
            with pytest.raises(Exception) as exception_info:  # noqa: PT011  each of RAISED in turn
                log.error("x")
            raised_in.add("filter" if "filter" in {frame.name for frame in exception_info.traceback} else "handler")
        orders_path.write_text("")
        log.error("x")
    finally:
        raising_handler.remove()
    assert raised_in == {"filter", "handler"}


def test_a_wire_affects_only_named_clients() -> None:
    """A fault between one worker and a hub does not affect other workers."""
    paths: list[str] = []
    names = iter(["b", "a", "a", "a", "a", "a"])
    with run_recording_service(paths) as service:
        wire = Wire(int(service.rpartition(":")[2]), lambda _port: next(names))
        by_wire = f"http://{HOST}:{wire.port}"
        wire.part("a")
        assert [outcome(by_wire, path) for path in ("/b", "/parted")] == ["201", "reset"]
        wire.let_through("a")
        wire.hold("a")
        assert outcome(by_wire, "/held", 0.1) == "silence"
        wire.let_through("a")
        wire.delay("a", 60.0)
        assert outcome(by_wire, "/late", 0.1) == "silence"
        wire.let_through("a")
        wire.lose_replies("a")
        assert outcome(by_wire, "/lost") == "reset"
        wire.let_through("a")
        assert outcome(by_wire, "/again") == "201"
        wire.cut()
    assert {"/b", "/lost", "/again"} <= set(paths)
    assert "/parted" not in paths


def test_a_connection_is_attributed_to_its_worker_by_port() -> None:
    """Workers share the proxy to a hub, which tells their connections apart by port."""
    program = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
    with closing(socket.create_server((HOST, 0))) as server:
        command = (sys.executable, "-c", program, str(server.getsockname()[1]))
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
            connection, (_, port) = server.accept()
            assert find_client_at_port(port, {"other": 1, "it": process.pid}) == "it"
            assert find_client_at_port(port, {"other": 1}) == ""
            connection.close()
            process.communicate()
