"""Tests that a supervisor restarts, drains and signals real processes, and leaves none behind when it dies."""

import errno
import itertools
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest
from children import child
from waiters import WAIT

from leasehold.adapters.cli.common.supervisor import Supervisor

pytestmark = pytest.mark.slow

SUPERVISOR = """
import signal, sys
from leasehold.adapters.cli.common.supervisor import Supervisor
commands = {name: (sys.executable, "-S", "-c", sys.argv[2], name) for name in sys.argv[3:]}
sys.exit(Supervisor(commands, float(sys.argv[1]), {2}).run((signal.SIGTERM, signal.SIGINT)))
"""
DRAINS = """
import os, sys
print(sys.argv[1], os.getpid(), flush=True)
sys.stdin.read()
print(sys.argv[1], "drained", flush=True)
"""
HANGS = """
import os, sys, time
print(sys.argv[1], os.getpid(), flush=True)
time.sleep(600)
"""
WRITES_LARGE_LINES = """
import os, sys
for number in range(50):
    line = (sys.argv[1] * 20000 + "\\n").encode()
    for begin in range(0, len(line), 3000):
        os.write(1, line[begin : begin + 3000])
print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def run_supervisor(
    code: str, *names: str, drain_seconds: float = 30.0
) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """Run a supervisor of processes that have these names and run `code`. Yield its process and its output."""
    command = [sys.executable, "-c", SUPERVISOR, str(drain_seconds), code, *names]
    with child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, process.stdout


def read_started_pids(out: IO[str], count: int) -> dict[str, int]:
    """Wait until this many processes have started, and return the process id of each name."""
    return {name: int(pid) for name, pid in (out.readline().split() for _ in range(count))}


def ends_in_time(pidfd: int) -> bool:
    """Wait for the end of this process, and return whether it ended in time."""
    return bool(select.select([pidfd], [], [], WAIT)[0])


def test_all_workers_drain_together_at_one_signal() -> None:
    with run_supervisor(DRAINS, "a-0", "a-1", "a-2") as (process, out):
        read_started_pids(out, 3)
        process.terminate()
        assert sorted(out) == ["a-0 drained\n", "a-1 drained\n", "a-2 drained\n"]
        assert process.wait(WAIT) == 0


def test_a_killed_process_restarts_under_its_name() -> None:
    """Under its own name, the process keeps its leases. Under another name, they would have to expire first."""
    with run_supervisor(DRAINS, "a-0", "a-1") as (process, out):
        first_pids = read_started_pids(out, 2)
        os.kill(first_pids["a-1"], signal.SIGKILL)
        restarted_pids = read_started_pids(out, 1)
        assert list(restarted_pids) == ["a-1"]
        assert restarted_pids["a-1"] != first_pids["a-1"]
        process.terminate()
        assert process.wait(WAIT) == 0


def test_each_restart_waits_longer() -> None:
    with run_supervisor("import sys; sys.exit(7)", "a-0") as (process, _out):
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.terminate()
        assert lines == [f"a-0 ended with status 7: it starts again in {pause} s\n" for pause in (1, 2)]
        assert process.wait(WAIT) == 0


def test_workers_end_when_the_supervisor_is_killed() -> None:
    """Workers that outlived their supervisor would run in parallel with new workers that have the same ids."""
    with run_supervisor(DRAINS, "a-0", "a-1") as (process, out):
        process_fds = [os.pidfd_open(pid) for pid in read_started_pids(out, 2).values()]
        process.kill()
        assert [ends_in_time(process_fd) for process_fd in process_fds] == [True, True]
    for process_fd in process_fds:
        os.close(process_fd)


def test_a_second_signal_kills_all_workers() -> None:
    with run_supervisor(HANGS, "a-0", "a-1") as (process, out):
        process_fds = [os.pidfd_open(pid) for pid in read_started_pids(out, 2).values()]
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) in {128 + signal.SIGINT, 128 + signal.SIGTERM}
        assert [ends_in_time(process_fd) for process_fd in process_fds] == [True, True]
    for process_fd in process_fds:
        os.close(process_fd)


def test_a_worker_that_does_not_drain_is_killed_and_logged() -> None:
    with run_supervisor(HANGS, "a-0", drain_seconds=0.0) as (process, out):
        read_started_pids(out, 1)
        process.terminate()
        assert process.wait(WAIT) == 1
        assert process.stderr is not None
        assert process.stderr.read() == "not ended within 0 s, killed: a-0\n"


def test_bad_usage_in_one_worker_ends_all() -> None:
    """A restart would not help, because the command line stays the same. So the other workers end at once."""
    code = "import sys; sys.argv[1] == 'a-1' and sys.exit(2); sys.stdin.read()"
    with run_supervisor(code, "a-0", "a-1") as (process, _out):
        assert process.wait(WAIT) == 2
        assert process.stderr is not None
        assert process.stderr.read() == "a-1 ended with status 2, so all processes end\n"


def test_output_lines_of_workers_are_not_interleaved() -> None:
    with run_supervisor(WRITES_LARGE_LINES, "a", "b", "c") as (process, out):
        finished_count, lines = 0, []
        while finished_count < 3:
            line = out.readline()
            finished_count += line == "done\n"
            lines.append(line)
        process.terminate()
        assert process.wait(WAIT) == 0
    assert {len(set(line)) for line in lines if line != "done\n"} == {2}
    assert {line: lines.count(line) for line in set(lines) - {"done\n"}} == {
        f"{character * 20000}\n": 50 for character in "abc"
    }


def test_a_signal_received_by_another_thread_ends_all_workers() -> None:
    """A signal that arrives while a thread is being started is not missed."""
    end_event = threading.Event()
    other_thread = threading.Thread(target=end_event.wait)
    other_thread.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    previous_handler = signal.getsignal(signal.SIGUSR1)
    try:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        command = (sys.executable, "-S", "-c", "import sys; sys.stdin.read()")
        assert Supervisor({"a-0": command}, 30.0, {2}).run([signal.SIGUSR1]) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, previous_handler)
        end_event.set()
        other_thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="LIMITS OF ANOTHER PROCESS ARE NOT LOWERED: it wants Linux")
def test_a_failed_restart_is_retried_while_the_others_run() -> None:
    with run_supervisor(DRAINS, "a-0", "a-1") as (process, out):
        assert process.stderr is not None
        first_pids = read_started_pids(out, 2)
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        # Too few file descriptors for another process, even with those that the dead one frees.
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(first_pids["a-1"], signal.SIGKILL)
        lines = [process.stderr.readline() for _ in range(3)]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        assert read_started_pids(out, 1).keys() == {"a-1"}
        process.terminate()
        assert sorted(out) == ["a-0 drained\n", "a-1 drained\n"]
        assert process.wait(WAIT) == 0
    pauses = [line.rpartition("in ")[2] for line in lines]
    assert (lines[0], pauses) == ("a-1 ended with status 137: it starts again in 1 s\n", ["1 s\n", "2 s\n", "4 s\n"])
    assert all(line.startswith("a-1 cannot be started: OSError: [Errno 24] Too many open files") for line in lines[1:])


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_process_whose_reader_thread_cannot_start_is_killed(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed and its pipes are closed, because the next attempt starts a process with the same id."""
    start, count, processes = threading.Thread.start, itertools.count(), list["subprocess.Popen[bytes]"]()

    def start_or_refuse(thread: threading.Thread) -> None:
        if next(count) == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    def start_and_record(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":  # noqa: ANN401  as Popen has them
        processes.append(subprocess.Popen(*words, **options))
        return processes[-1]

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    monkeypatch.setattr("leasehold.adapters.cli.common.supervisor.Popen", start_and_record)
    earlier_threads = set(threading.enumerate())
    command = (sys.executable, "-S", "-c", "import sys; sys.stdin.read()")
    supervisor = Supervisor({"a-0": command}, 30.0, {2})
    (supervised_process,) = supervisor.create_processes()
    supervisor.start_or_postpone(supervised_process)
    for thread in set(threading.enumerate()) - earlier_threads:
        thread.join(WAIT)
    (process,) = processes
    assert (supervised_process.process, process.returncode) == (None, -signal.SIGKILL)
    assert [pipe.closed for pipe in (process.stdin, process.stdout, process.stderr) if pipe] == [True] * 3


def test_end_of_a_worker_is_noticed_while_its_output_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler may have started a program that inherits the output and goes on."""
    monkeypatch.setattr("leasehold.adapters.cli.common.supervisor.EXIT_LIMIT_SECONDS", 0.1)
    code = "import subprocess; subprocess.Popen(['cat'])"
    supervisor = Supervisor({"a-0": (sys.executable, "-S", "-c", code)}, 30.0, {2})
    (child_of_it,) = supervisor.create_processes()
    supervisor.start_or_postpone(child_of_it)
    threads = [thread for thread in threading.enumerate() if thread.name in {"watch-a-0", "relay-a-0"}]
    (watching,) = [thread for thread in threads if thread.name == "watch-a-0"]
    watching.join(WAIT)
    assert [thread.is_alive() for thread in threads if thread != watching] == [True, True]
    assert child_of_it.process is not None
    assert child_of_it.process.stdin is not None
    child_of_it.process.stdin.close()  # ends the program
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


class BrieflyFullFile:
    """A file that rejects a number of writes, and accepts a few bytes before each rejection."""

    def __init__(self, refusals: int, error_number: int) -> None:
        self.left, self.why, self.written = 2 * refusals, error_number, bytearray()
        self.raw = self.buffer = self

    def write(self, data: bytes) -> int:
        """Accept three bytes and reject the next write, in turn, until there have been enough rejections."""
        self.left -= 1
        if self.left >= 0 and self.left % 2 == 0:
            raise OSError(self.why, os.strerror(self.why))
        size = 3 if self.left >= 0 else len(data)
        self.written += data[:size]
        return min(size, len(data))


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_briefly_full_disk_ends_no_worker(why: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers do not end with 141, the status of a closed pipe, and no line is torn or lost."""
    monkeypatch.setattr("leasehold.adapters.cli.common.supervisor.WRITE_RETRY_SECONDS", (0.0, 0.01))
    full_file = BrieflyFullFile(5, why)
    monkeypatch.setattr("sys.stdout", full_file)
    code = "for number in range(20): print('line', number)"
    supervisor = Supervisor({"a-0": (sys.executable, "-S", "-c", f"{code}\nraise SystemExit(2)")}, 30.0, {2})
    previous_handler = signal.getsignal(signal.SIGUSR1)
    try:
        assert supervisor.run([signal.SIGUSR1]) == 2
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)
    assert full_file.written.decode() == "".join(f"line {number}\n" for number in range(20))
