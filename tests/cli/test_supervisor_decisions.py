"""Tests when a supervisor restarts or kills a process, with scripted events in place of real processes."""

import io
import math
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from waiters import Clock

from leasehold.adapters.cli.common import supervisor as supervisor_module
from leasehold.adapters.cli.common.supervisor import (
    EXIT_LIMIT_SECONDS,
    SUPERVISED_VARIABLE,
    Supervisor,
    _SupervisedProcessEnded,
    call_at_end_of_supervisor,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the supervisor."""
    clock = Clock()
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=clock))
    return clock


class ScriptedProcess:
    """A process that does nothing and records the calls of its methods."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.stdin = SimpleNamespace(close=lambda: self.done.append("drain"))

    def poll(self) -> None:
        """Return None, because the process runs until it is killed."""

    def kill(self) -> None:
        self.done.append("kill")


def make_supervisor(get_event: Callable[[float], object]) -> Supervisor:
    made_supervisor = Supervisor({"a-0": ("true",)}, 30.0, {2})
    events: Any = SimpleNamespace(get=get_event)
    made_supervisor._events = events  # noqa: SLF001
    return made_supervisor


def test_pause_grows_with_each_restart_until_a_process_has_run_for_a_minute(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_seconds = iter([1.0, 1.0, 59.9, 60.0, 1.0, *[1.0] * 7])
    pauses: list[float] = []
    processes: list[ScriptedProcess] = []

    def start(_supervisor: Supervisor, child: Any) -> None:  # noqa: ANN401  a private class
        processes.append(ScriptedProcess())
        child.process, child.started = processes[-1], clock.now

    def get_event(deadline: float) -> object:
        if deadline < math.inf:
            pauses.append(deadline - clock.now)
            clock.now = deadline
            return None
        if (seconds := next(run_seconds, None)) is None:
            return 15
        clock.now += seconds
        return _SupervisedProcessEnded(child, 1)

    monkeypatch.setattr(Supervisor, "start_or_postpone", start)
    made_supervisor = make_supervisor(get_event)
    (child,) = children = made_supervisor.create_processes()
    assert made_supervisor._keep_running(children) == 0  # noqa: SLF001
    assert pauses == [1.0, 2.0, 4.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert [process.done for process in processes] == [["drain"]] * 12 + [[]]


@pytest.mark.parametrize(("first_status", "exit_status"), [(0, 1), (2, 2)])
def test_process_that_does_not_drain_in_time_is_killed_and_not_before(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, first_status: int, exit_status: int
) -> None:
    process = ScriptedProcess()
    began_at = clock.now

    def keep_running(_supervisor: Supervisor, children: list[Any]) -> int:
        children[0].process = process
        return first_status

    def get_event(deadline: float) -> None:
        assert process.done == ["drain"]
        clock.now = deadline

    monkeypatch.setattr(Supervisor, "_keep_running", keep_running)
    assert make_supervisor(get_event).run(()) == exit_status
    assert (clock.now - began_at, process.done) == (30.0 + EXIT_LIMIT_SECONDS, ["drain", "kill"])


@pytest.mark.parametrize(
    ("first_status", "statuses", "exit_status"), [(0, [0, 0], 0), (0, [0, -9], 137), (0, [3, 0], 3), (2, [0, 3], 2)]
)
def test_first_failure_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, first_status: int, statuses: list[int], exit_status: int
) -> None:
    ends: list[Iterator[_SupervisedProcessEnded]] = []

    def keep_running(_supervisor: Supervisor, children: list[Any]) -> int:
        for child in children:
            child.process = ScriptedProcess()
        ends.append(map(_SupervisedProcessEnded, children, statuses))
        return first_status

    monkeypatch.setattr(Supervisor, "_keep_running", keep_running)
    made_supervisor = make_supervisor(lambda _deadline: next(ends[0]))
    made_supervisor.commands = {"a-0": ("true",), "a-1": ("true",)}
    assert made_supervisor.run(()) == exit_status


@pytest.mark.parametrize(("status", "passed_on"), [(0, b"a\nb\n"), (1, b"a\nb\n"), (-9, b"a\n")])
def test_half_a_line_is_passed_on_only_if_the_process_was_not_killed(status: int, passed_on: bytes) -> None:
    written = bytearray()
    process: Any = SimpleNamespace(wait=lambda: status)
    sink: Any = SimpleNamespace(write=written.extend)
    make_supervisor(lambda _deadline: None)._relay_output(process, io.BytesIO(b"a\nb"), sink)  # noqa: SLF001
    assert written == passed_on


def test_supervised_process_stops_at_the_end_or_a_failure_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the process starts are not supervised themselves."""
    spawned: list[tuple[Callable[[], None], Callable[[BaseException], None]]] = []
    stops: list[str] = []
    chunks = [b"x", b""]
    monkeypatch.setattr(supervisor_module, "spawn", lambda _name, work, on_failure: spawned.append((work, on_failure)))
    monkeypatch.setattr(os, "read", lambda _fd, _size: chunks.pop(0))
    monkeypatch.setenv(SUPERVISED_VARIABLE, "1")
    for _ in range(2):
        call_at_end_of_supervisor(lambda: stops.append("stop"))
    assert SUPERVISED_VARIABLE not in os.environ
    ((wait_for_end, on_failure),) = spawned
    wait_for_end()
    assert (stops, chunks) == (["stop"], [])
    on_failure(OSError("bad descriptor"))
    assert stops == ["stop", "stop"]


def test_process_has_its_own_session_and_is_killed_if_its_end_cannot_be_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C must reach only the supervisor, and a process that nothing watches would never be restarted."""
    failure_handlers: dict[str, Callable[[BaseException], None]] = {}
    ended: list[object] = []

    def note_thread(name: str, _work: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        failure_handlers[name] = on_failure

    monkeypatch.setattr(supervisor_module, "spawn", note_thread)
    made_supervisor = make_supervisor(lambda _deadline: None)
    events: Any = SimpleNamespace(put=ended.append)
    made_supervisor._events = events  # noqa: SLF001
    made_supervisor.commands = {"a-0": ("sleep", "5")}
    (child,) = made_supervisor.create_processes()
    made_supervisor.start_or_postpone(child)
    assert child.process is not None
    with child.process as process:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        failure_handlers["watch-a-0"](MemoryError())
    assert ended == [_SupervisedProcessEnded(child, -signal.SIGKILL)]
