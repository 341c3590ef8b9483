"""Tests `leasehold multilang` on local services, with children that are real processes."""

import base64
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest
from ground import Ground, processor

from leasehold.adapters.ops.swapping import move_until_arrived, open_joined, set_direction, wait_until_known
from leasehold.stores.swap import TO, lease_place
from leasehold.stores.urls import display_name, open_store

pytestmark = pytest.mark.services


def _find_shard_id(line: str) -> str:
    match = re.search(r"shardId-[0-9]{12}", line)
    assert match is not None
    return match[0]


def test_split_stream_is_read_to_its_end_and_a_signal_drains(ground: Ground) -> None:
    """The end of a shard is stored only once its child confirms it, and the last records are checkpointed."""
    ground.put("a", "b", "c")
    with ground.daemon(processor("faithful")) as daemon:
        daemon.await_line(lambda line: "got initialize" in line)
        daemon.await_line(lambda line: "got processRecords" in line)
        ground.kinesis.split_shard(
            StreamName=ground.stream, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127)
        )
        daemon.await_line(lambda line: "got shardEnded" in line)
        daemon.await_line(lambda line: "ended with status 0" in line)
        shards = {_find_shard_id(daemon.await_line(lambda line: "got initialize" in line)) for _ in range(2)}
        assert shards == {"shardId-000000000001", "shardId-000000000002"}
        (last_sequence_number,) = ground.put("d")
        shard = _find_shard_id(daemon.await_line(lambda line: "got processRecords" in line))
        assert daemon.end() == 0
        positions = daemon.checkpoints()
        assert (positions[shard], positions.get("shardId-000000000000", "SHARD_END")) == (
            last_sequence_number,
            "SHARD_END",
        )
        last_messages = [
            stderr_line.partition(" ")[2] for stderr_line in daemon.child_stderr() if "initialize" not in stderr_line
        ][-4:]
        assert sorted(last_messages) == ["leaseLost 0", "leaseLost 0", "shutdownRequested 0", "shutdownRequested 0"]


def test_record_that_crashes_its_child_is_dead_lettered(ground: Ground, tmp_path: Path) -> None:
    ground.put("a", "b", "poison", "c")
    dead_letter_folder = tmp_path / "letters"
    arguments = ("--dead-letter", f"file://{dead_letter_folder}", "--attempts", "2")
    with ground.daemon(processor("poison"), *arguments) as daemon:
        daemon.await_line(lambda line: "was dead-lettered" in line)
        daemon.await_line(lambda line: "got processRecords" in line)
        (last_sequence_number,) = ground.put("d")
        daemon.await_line(lambda line: "got processRecords 1" in line)
        assert daemon.end() == 0
        assert list(daemon.checkpoints().values()) == [last_sequence_number]
    (letter,) = dead_letter_folder.iterdir()
    assert "poison" in letter.read_text() or base64.b64encode(b"poison").decode() in letter.read_text()


def test_empty_batches_are_delivered_if_the_file_asks_for_them(ground: Ground) -> None:
    """A child that flushes at fixed intervals must be called even if there are no records."""
    with ground.daemon(processor("well"), callProcessRecordsEvenForEmptyRecordList="true") as daemon:
        for _ in range(2):
            daemon.await_line(lambda line: "got processRecords 0" in line)
        ground.put("a")
        daemon.await_line(lambda line: "got processRecords 1" in line)
        assert daemon.end() == 0


def test_daemon_continues_while_its_leases_move_to_another_store(ground: Ground, tmp_path: Path) -> None:
    ground.put("a")
    target_url = f"sqlite://{tmp_path}/to.db"
    with ground.daemon(processor("faithful"), "--to", target_url) as daemon:
        daemon.await_line(lambda line: "got processRecords 1" in line)
        with closing(open_store(ground.store, create=False)) as source, closing(open_store(target_url)) as target:
            tables, names = (source, target), (display_name(ground.store), display_name(target_url))
            store = open_joined(tables, names)
            wait_until_known(tables, store, names[TO], 60.0)
            set_direction(tables, "to")
            (*_, last_status) = move_until_arrived(tables, store, names[TO])
            assert (last_status.gone, last_status.there, last_status.moving) == (1, 0, 0)
            (second_number,) = ground.put("b")
            daemon.await_line(lambda line: "got processRecords 1" in line)
            assert daemon.end() == 0
            (remaining_lease,) = store.list().leases
        assert (remaining_lease.owner, remaining_lease.checkpoint.sequence, lease_place(remaining_lease)) == (
            None,
            second_number,
            "TO",
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("behavior", ["crash", "SIGTERM", "SIGINT"])
def test_strict_mode_exits_with_javas_status(behavior: str, ground: Ground) -> None:
    ground.put("a")
    with ground.daemon(processor(behavior, "processRecords"), "--strict") as daemon:
        daemon.await_line(lambda line: "got processRecords 1" in line)
        if behavior == "crash":
            assert daemon.await_end() == 1
        else:
            assert daemon.end(signal.Signals[behavior]) == 128 + signal.Signals[behavior]
        assert set(daemon.checkpoints().values()) == {"TRIM_HORIZON"}


def test_missing_child_program_does_not_end_the_daemon(ground: Ground) -> None:
    ground.put("a")
    with ground.daemon("/no/such/program", "--attempts", "2") as daemon:
        daemon.await_line(lambda line: "/no/such/program" in line)
        daemon.await_line(lambda line: "stops here" in line)
        assert daemon.end() == 0
