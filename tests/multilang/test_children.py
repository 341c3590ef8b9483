"""Tests that children run as processes, and that a fault of one affects only its own shard."""

import asyncio
import logging
import os
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from leasehold.adapters.multilang import children as module
from leasehold.adapters.multilang.children import ChildFault, ChildNotStarted, ChildProcesses
from leasehold.adapters.multilang.protocol import CheckpointError
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import TRIM_HORIZON, Position

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("child.py")
RECORDS = [Record(b"x", str(number), 0, "k", arrived=1.0) for number in range(1, 6)]


def _argv(behavior: str = "well", action: str = "processRecords") -> list[str]:
    return [sys.executable, str(CHILD), behavior, action]


async def _reject_checkpoint(_position: Position) -> CheckpointError | None:
    raise AssertionError("no checkpoint is asked for")


def _run_and_close(children: ChildProcesses, steps: Callable[[], Awaitable[None]]) -> None:
    async def run_steps() -> None:
        try:
            await steps()
        finally:
            await children.close()
        assert children.pids == {}

    asyncio.run(run_steps())


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _await_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 60)[0] == [descriptor]
    os.close(descriptor)


@pytest.fixture(autouse=True)
def _shorten_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXIT_SECONDS", 1.0)
    monkeypatch.setattr(module, "LEASE_MOVING_SECONDS", 1.0)


def test_child_receives_every_message_of_its_life(caplog: pytest.LogCaptureFixture) -> None:
    """A child receives its shard, its records, the request to shut down, and the loss of its lease."""
    caplog.set_level(logging.INFO, "leasehold.child")
    children = ChildProcesses(_argv(), max_records=2)

    async def main() -> None:
        await children.start_child("s", TRIM_HORIZON, _reject_checkpoint)
        pid = children.pids["s"]
        await children.process_batch("s", TRIM_HORIZON, RECORDS, 1.0, _reject_checkpoint)
        await children.process_batch("s", TRIM_HORIZON, [], 1.0, _reject_checkpoint)
        assert children.pids == {"s": pid}
        await children.request_shutdown("s")
        await children.lose_lease("s")
        assert children.pids == {}
        assert _has_ended(pid)
        await children.lose_lease("s")

    _run_and_close(children, main)
    lines = [record.message.partition(": ")[2] for record in caplog.records]
    assert lines == [
        "started",
        "got initialize 0",
        *(f"got processRecords {count}" for count in (2, 2, 1, 0)),
        "got shutdownRequested 0",
        "got leaseLost 0",
        "ended with status 0",
    ]


def test_checkpoint_is_stored_before_it_is_confirmed(caplog: pytest.LogCaptureFixture) -> None:
    """A child may discard its records as soon as its checkpoint is confirmed."""
    caplog.set_level(logging.INFO, "leasehold.child")
    children, stored_positions = ChildProcesses(_argv("checkpoint")), list[Position]()

    async def store(position: Position) -> CheckpointError | None:
        assert not any("checkpoint" in record.message for record in caplog.records)
        stored_positions.append(position)
        return None

    async def main() -> None:
        await children.process_batch("s", TRIM_HORIZON, RECORDS, None, store)
        await children.request_shutdown("s")

    _run_and_close(children, main)
    assert stored_positions == [Position("5")]
    checkpoint_lines = [record for record in caplog.records if "checkpoint" in record.message]
    assert [record.message.rpartition(" ")[2] for record in checkpoint_lines] == ["None", "IllegalArgumentException"]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_shard_end_is_stored_only_after_the_childs_checkpoint(checkpoints: bool) -> None:
    children, stored_sequences = (
        ChildProcesses(_argv("checkpoint" if checkpoints else "well", "shardEnded")),
        list[str](),
    )

    async def store(position: Position) -> CheckpointError | None:
        stored_sequences.append(position.sequence)
        return None

    async def main() -> None:
        await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint if not checkpoints else store)
        assert await children.end_shard("s", TRIM_HORIZON, store) is checkpoints
        assert children.pids == {}

    _run_and_close(children, main)
    assert stored_sequences == (["SHARD_END"] if checkpoints else [])


@pytest.mark.parametrize("behavior", ["crash", "hang", "close", "wrong", "orphan"])
def test_failed_child_affects_only_its_own_shard(behavior: str) -> None:
    hang_timeout = 5.0 if behavior == "hang" else None
    failing_children, healthy_children = (
        ChildProcesses(_argv(behavior), timeout_seconds=hang_timeout),
        ChildProcesses(_argv()),
    )

    async def main() -> None:
        await failing_children.start_child("s", TRIM_HORIZON, _reject_checkpoint)
        first_pid = failing_children.pids["s"]
        with pytest.raises(ChildFault):
            await failing_children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)
        assert failing_children.pids == {}
        assert _has_ended(first_pid)
        await failing_children.start_child("s", TRIM_HORIZON, _reject_checkpoint)
        assert failing_children.pids["s"] != first_pid
        await healthy_children.process_batch("t", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)
        await healthy_children.close()

    _run_and_close(failing_children, main)


@pytest.mark.parametrize("argv", [_argv("crash", "initialize"), ["/no/such/program"], _argv("hang", "initialize")])
def test_missing_program_dead_letters_no_record(argv: list[str]) -> None:
    children = ChildProcesses(argv, timeout_seconds=2.0)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ChildNotStarted):
                await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)
            assert children.pids == {}

    _run_and_close(children, main)


def test_noisy_child_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """If a processor prints to standard output, it neither fills the log nor blocks on a full pipe."""
    children = ChildProcesses(_argv("babble"))

    async def main() -> None:
        for _ in range(2):
            await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)

    with caplog.at_level(logging.INFO, "leasehold.child"):
        _run_and_close(children, main)
    messages = [record.message.partition(": ")[2] for record in caplog.records if "got" not in record.message]
    assert messages == [
        "started",
        f"a line on its standard output is not a message (not JSON); logged once: debug {'x' * 100}",
        "ended with status 0, and 6000 lines on its standard output were not messages",
    ]


def test_timed_out_child_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    """A child that timed out does not run at the same time as the shard's next child."""
    children = ChildProcesses(_argv("hang"))

    async def main() -> None:
        await children.start_child("s", TRIM_HORIZON, _reject_checkpoint)
        pid = children.pids["s"]
        task = asyncio.create_task(children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint))
        while not any("got processRecords" in record.message for record in caplog.records):  # noqa: ASYNC110  of a log
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children.pids == {}
        assert _has_ended(pid)

    with caplog.at_level(logging.INFO, "leasehold.child"):
        _run_and_close(children, main)


@pytest.mark.skipif(sys.platform != "linux", reason="a process is waited for as Linux does")
def test_processes_started_by_a_child_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """Processes that a child started may have inherited its pipes."""
    children = ChildProcesses(_argv("orphan"))

    async def main() -> None:
        with pytest.raises(ChildFault, match="it exited with status 0"):
            await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)

    with caplog.at_level(logging.INFO, "leasehold.child"):
        _run_and_close(children, main)
    (pid,) = (int(record.message.split()[-1]) for record in caplog.records if "has started" in record.message)
    _await_end(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="a process is waited for as Linux does")
@pytest.mark.parametrize("keeper_dies", [False, True])
def test_killed_daemon_leaves_no_orphans(keeper_dies: bool, tmp_path: Path) -> None:
    """The children end even if the process that watches over them is killed before the daemon."""
    program = tmp_path / "daemon.py"
    program.write_text(
        "import asyncio\n"
        "from leasehold.adapters.multilang.children import ChildProcesses\n"
        "from leasehold.balancer.model import TRIM_HORIZON\n"
        "async def main():\n"
        f"    children = ChildProcesses({_argv('parent', 'initialize')!r})\n"
        "    await children.start_child('s', TRIM_HORIZON, None)\n"
        f"    if {keeper_dies}:\n"
        "        children._keeper_process.kill()\n"
        "        children._keeper_process.wait()\n"
        "    await children.start_child('t', TRIM_HORIZON, None)\n"
        "    await children.start_child('u', TRIM_HORIZON, None)\n"
        "    await children.lose_lease('u')\n"
        "    print(*children.pids.values(), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "CHILD_NOTES": str(tmp_path)}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, env=environment) as daemon:
        assert daemon.stdout is not None
        pids = [int(child_pid) for child_pid in daemon.stdout.readline().split()]
        pids += [int((tmp_path / f"started.{child_pid}").read_text()) for child_pid in pids]
        assert len(pids) == 4
        daemon.kill()
    for pid in pids:
        _await_end(pid)


def test_child_that_hangs_at_shard_end_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    children, pids = ChildProcesses(_argv("hang", "shardEnded"), shard_end_seconds=1.0), list[int]()

    async def main() -> None:
        for _ in range(2):
            await children.start_child("s", TRIM_HORIZON, _reject_checkpoint)
            pids.append(children.pids["s"])
            with pytest.raises(ChildFault, match=r"^it has not answered shardEnded within 1 s$"):
                await children.end_shard("s", TRIM_HORIZON, _reject_checkpoint)
            assert _has_ended(pids[-1])

    with caplog.at_level(logging.WARNING, "leasehold.child"):
        _run_and_close(children, main)
    assert [record.message for record in caplog.records] == [
        f"shard s, child {pid}: given up: ChildFault: it has not answered shardEnded within 1 s" for pid in pids
    ]


@pytest.mark.parametrize("action", ["shutdownRequested", "leaseLost"])
def test_last_message_to_a_child_has_a_timeout(action: str) -> None:
    """The next owner and the next child of a shard never wait forever, even without `timeoutInSeconds`."""
    children = ChildProcesses(_argv("hang", action))

    async def main() -> None:
        await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)
        pid = children.pids["s"]
        if action == "shutdownRequested":
            with pytest.raises(ChildFault, match=r"^it has not answered shutdownRequested within 1 s$"):
                await children.request_shutdown("s")
        else:
            await children.lose_lease("s")
        assert children.pids == {}
        assert _has_ended(pid)

    _run_and_close(children, main)


def test_reclaimed_lease_waits_for_the_previous_child_to_end(caplog: pytest.LogCaptureFixture) -> None:
    children = ChildProcesses(_argv("hang"))

    async def main() -> None:
        batch_task = asyncio.create_task(children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint))
        while not any("got processRecords" in record.message for record in caplog.records):  # noqa: ASYNC110  of a log
            await asyncio.sleep(0.01)
        first_pid = children.pids["s"]
        lose_task = asyncio.create_task(children.lose_lease("s"))
        await asyncio.sleep(0)  # let `lose_lease` begin to wait before the lease is claimed again
        start_task = asyncio.create_task(children.start_child("s", TRIM_HORIZON, _reject_checkpoint))
        with pytest.raises(ChildFault):
            await batch_task
        assert _has_ended(first_pid)
        await asyncio.gather(lose_task, start_task)
        # The last message about the lost lease must not end the child of the new one.
        assert children.pids["s"] != first_pid

    with caplog.at_level(logging.INFO, "leasehold.child"):
        _run_and_close(children, main)


def test_no_child_is_started_after_close() -> None:
    """If a lease is taken while the daemon shuts down, no child is started for it."""
    children = ChildProcesses(_argv())

    async def main() -> None:
        await children.close()
        with pytest.raises(ChildNotStarted, match=r"^the daemon is shutting down$"):
            await children.start_child("s", TRIM_HORIZON, _reject_checkpoint)

    _run_and_close(children, main)


def test_unterminated_stderr_line_is_logged_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    """A progress bar, which ends no lines, neither fills the memory nor blocks its processor on a full pipe."""
    children = ChildProcesses(_argv("long"))

    async def main() -> None:
        for _ in range(2):
            await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)

    with caplog.at_level(logging.INFO, "leasehold.child"):
        _run_and_close(children, main)
    text = "".join(record.message.partition(": ")[2] for record in caplog.records)
    assert text.count("y") == 400_000
    assert max(len(record.message) for record in caplog.records) < 2**17 + 100


def test_unterminated_stderr_line_is_logged_while_the_child_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The amazon_kclpy sample writes lines to standard error without ending them."""
    children = ChildProcesses(_argv("endless"))

    async def main() -> None:
        await children.process_batch("s", TRIM_HORIZON, RECORDS, None, _reject_checkpoint)
        async with asyncio.timeout(60):
            while not any("no line end" in record.message for record in caplog.records):  # noqa: ASYNC110  of a log
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO, "leasehold.child"):
        _run_and_close(children, main)


def test_keeper_handles_many_children_that_never_named_their_group() -> None:
    """The keeper reads its pipe to the end."""
    keeper_input = "".join(f"- {number}\n" for number in range(1, 200))
    keeper_command = ["/bin/sh", "-c", module._KEEPER_SCRIPT]  # noqa: SLF001  not accessible otherwise
    assert subprocess.run(keeper_command, input=keeper_input, text=True, timeout=20, check=False).returncode in {0, 1}


def test_keeper_forgets_the_group_of_a_child_that_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system may since have given the number of the group to another program."""
    monkeypatch.setattr(module, "_KEEPER_SCRIPT", f"cat > {tmp_path}/groups")
    children, pids = ChildProcesses(_argv()), list[int]()

    async def main() -> None:
        await children.start_child("s", TRIM_HORIZON, _reject_checkpoint)
        pids.append(children.pids["s"])
        await children.lose_lease("s")

    _run_and_close(children, main)
    (pid,) = pids
    assert (tmp_path / "groups").read_text().splitlines() == [f"+ {pid}", f"- {pid}"]
