"""Tests that processes that serve a port try another port if needed, stop on request, and end with their parent."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from children import child

from leasehold.adapters.toolchain import ServiceError
from leasehold_lab.standins.node import ServiceCommand, accepts_connections, find_free_port, run_service

SERVES = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    held = []
    while True:
        held.append(server.accept())
"""


GREETS = (
    SERVES
    + """
        held[-1][0].sendall(b"!")
"""
)


def _python(code: str) -> Callable[[int], ServiceCommand]:
    return lambda port: ServiceCommand((sys.executable, "-c", code, str(port)))


def test_an_error_contains_the_output_of_a_service_that_did_not_start() -> None:
    with (
        pytest.raises(ServiceError, match=r"frail ended with status 3; its last words:\nno disk"),
        run_service("frail", _python("import sys; print('no disk'); sys.exit(3)")),
    ):
        pass


def test_waiting_for_a_silent_service_ends() -> None:
    with (
        pytest.raises(ServiceError, match=r"mute did not answer within 0.2 s"),
        run_service("mute", _python("import threading; threading.Event().wait()"), start_seconds=0.2),
    ):
        pass


def test_another_port_is_tried_if_the_first_is_taken() -> None:
    ports: list[int] = []

    def command(port: int) -> ServiceCommand:
        ports.append(port)
        if len(ports) == 1:
            return _python("import sys; sys.exit('bind: EADDRINUSE')")(port)
        return _python(SERVES)(port)

    with run_service("late", command) as service:
        assert (len(ports), service.port, accepts_connections(service.port)) == (2, ports[-1], True)


def test_a_start_fails_after_three_ports() -> None:
    ports: list[int] = []

    def command(port: int) -> ServiceCommand:
        ports.append(port)
        return _python("import sys; sys.exit('Address already in use')")(port)

    with pytest.raises(ServiceError, match="Address already in use"), run_service("late", command):
        pass
    assert len(ports) == 3


def test_an_error_contains_the_output_of_a_service_that_crashed() -> None:
    crashing_program = SERVES.replace(
        "held.append(server.accept())", "server.accept()[0].recv(1) and sys.exit('out of memory')"
    )
    with pytest.raises(ConnectionError) as exception_info, run_service("frail", _python(crashing_program)) as service:
        _talk_to_death(service.port)
    assert exception_info.value.__notes__ == ["frail had ended by then; its last words:\nout of memory"]


def _talk_to_death(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b""
    raise ConnectionError("it does not answer")


def test_a_service_that_ignores_sigterm_is_killed() -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVES
    with run_service("stubborn", _python(program)) as service:
        assert accepts_connections(service.port)
    assert not accepts_connections(service.port)


def test_a_service_ends_with_its_parent() -> None:
    parent = f"""
import sys, threading
from leasehold_lab.standins.node import ServiceCommand, run_service
with run_service("orphan", lambda port: ServiceCommand((sys.executable, "-c", {GREETS!r}, str(port)))) as service:
    print(service.port, flush=True)
    threading.Event().wait()
"""
    with child([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            assert connection.recv(1) == b"!"
            process.send_signal(signal.SIGKILL)
            # The service keeps every connection open, so the connection ends only when the service does.
            assert connection.recv(1) == b""


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", find_free_port())) as server:
        assert accepts_connections(server.getsockname()[1])
