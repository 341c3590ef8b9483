"""The content of dead letters. None is lost or duplicated, and a replay removes only those that it has handled."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from attrs import evolve
from dead_letter_buckets import Bucket
from hypothesis import example, given
from hypothesis import strategies as st
from reader_harness import ReaderHarness
from typer.testing import CliRunner
from written_dead_letters import dead_letter

from leasehold.adapters.cli.main import app
from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry, dead_letter_from, sort_key_of
from leasehold.adapters.consumer.dead_letters.objects import ObjectSink
from leasehold.adapters.consumer.dead_letters.replaying import DeadLetterHolding, HandlerCaller, ReplayVerdict, replay
from leasehold.adapters.consumer.dead_letters.sinks import FolderSink, dead_letters, open_dead_letters
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consuming import open_dead_letter
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.progress import ProgressMeter, progress_of
from leasehold.balancer.model import TRIM_HORIZON, Position
from leasehold_lab.simulator.world.world import ShardRecords, create_records

TEXTS = st.text(max_size=20)
NUMBERS = st.integers(0, 10**56).map(str)
RECORDS = st.builds(
    Record,
    st.binary(max_size=50),
    NUMBERS,
    st.integers(0, 10**6),
    partition_key=st.none() | TEXTS,
    explicit_hash_key=st.none() | NUMBERS,
    arrived=st.none() | st.integers(0, 10**13).map(lambda ms: ms / 1000),
    token=TEXTS,
    aggregated=st.just(False),
    event=st.none(),
)
LETTERS = st.builds(
    DeadLetterEntry,
    table=TEXTS,
    stream=TEXTS,
    shard=TEXTS,
    lease=TEXTS,
    record=RECORDS,
    error=TEXTS,
    text=TEXTS,
    attempts=st.integers(0, 99),
    worker=TEXTS,
    time_ms=st.integers(0, 10**13),
    source=TEXTS,
)


# An offset may end with white space, which must be kept because a replay sends the offset back to the service.
@example(DeadLetterEntry("", "", "s-0", "s-0", Record(b"", "7", token="8 "), "E", "", 1, "w", 0))  # noqa: S106  an offset
@given(LETTERS)
def test_dead_letter_survives_a_round_trip_as_one_line(dead_letter: DeadLetterEntry) -> None:
    """The replayed record equals the record that failed."""
    assert dead_letter.line.count(b"\n") == 1
    assert dead_letter_from(dead_letter.line) == dead_letter
    assert len(dead_letter.name) < 255
    assert "/" not in dead_letter.name


def url(folder: Path) -> str:
    """Return the URL of the folder."""
    return f"file://{folder}"


def poison(*numbers: int) -> tuple[ReaderHarness, list[bytes]]:
    """Return a worker whose handler fails on these records, and the list to which the handler adds all other data."""
    handled_data: list[bytes] = []

    def handle(delivery: Delivery) -> None:
        if poisoned_data := [record.data for record in delivery.records if int(record.data) in numbers]:
            raise ValueError(f"{poisoned_data[0]!r} is poison")
        handled_data.extend(record.data for record in delivery.records)

    return ReaderHarness(ShardRecords(create_records(6)), on_batch=handle), handled_data


def test_failing_record_becomes_a_dead_letter_with_its_origin_and_error(tmp_path: Path) -> None:
    harness, handled_data = poison(4)
    dead_letter = dead_letters(url(tmp_path / "letters"), stream="orders", table="memory://orders-app")
    harness.steps(harness.reading(attempts=2, dead_letter=dead_letter), 12)
    (file,) = (tmp_path / "letters").iterdir()
    fields = json.loads(file.read_text())
    assert isinstance(fields.pop("time_ms"), int)
    assert fields == {
        "table": "memory://orders-app",
        "source": "",
        "stream": "orders",
        "shard": "s-0",
        "lease": "s-0",
        "sequence_number": "104",
        "sub_sequence_number": 0,
        "offset": "",
        "partition_key": "k-4",
        "explicit_hash_key": None,
        "arrived_ms": None,
        "error": "ValueError",
        "text": "b'4' is poison",
        "attempts": 2,
        "alone": 1,
        "worker": "a-1",
        "data": "NA==",
    }
    assert handled_data == [b"0", b"1", b"2", b"3", b"5"]
    assert harness.store.row("s-0").checkpoint == Position("105")


def test_failed_dead_letter_write_stops_the_shard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harness, _ = poison(0)
    dead_letter = dead_letters(url(tmp_path / "letters"))
    (tmp_path / "letters").rmdir()
    harness.holding.progress.enable_annotations("vm", lambda: harness.clock.now, harness.clock.now)
    harness.run_until_done(harness.reading(attempts=1, dead_letter=dead_letter))
    row = harness.store.row("s-0")
    assert (row.owner, row.checkpoint, harness.happenings) == (None, TRIM_HORIZON, ["initialize", "stopped"])
    # Both the log and the status name the sink.
    sink = f"{url(tmp_path / 'letters')}: the dead letter could not be written"
    reason = f"{sink}: No such file or directory"
    assert f"neither its handler nor the dead letter accepted record 100.0: DeadLetterError: {reason}" in caplog.text
    progress = progress_of(row)
    assert progress is not None
    cause = f"its handler raised ValueError; the dead letter did not accept the record: {sink}"
    assert progress.cause.startswith(cause)  # A row stores only the beginning of a long cause.
    # When the handler fails again on the next worker, the cause still includes the failure of the dead letter.
    next_meter = ProgressMeter(row, "a-2")
    next_meter.failed("its handler raised ValueError (attempt 1 of 2)", 1.0)
    assert sink in next_meter.progress(1.0, 1.0).cause
    next_meter.part_done(2.0)
    assert next_meter.progress(2.0, 2.0).dead_letter == "", "the record was dead-lettered"


def test_record_that_is_dead_lettered_twice_has_one_dead_letter_per_group(tmp_path: Path) -> None:
    for table in ("one", "one", "two"):
        harness, _ = poison(4)
        dead_letter = dead_letters(url(tmp_path), table=table)
        harness.steps(harness.reading(attempts=1, dead_letter=dead_letter), 12)
    assert len(list(tmp_path.iterdir())) == 2


def filled(folder: Path, *entries: DeadLetterEntry) -> Path:
    """Create the folder with these dead letters, and return it."""
    folder.mkdir()
    for entry in entries:
        (folder / entry.name).write_bytes(entry.line)
    return folder


def test_replay_killed_half_way_is_completed_by_the_next(tmp_path: Path) -> None:
    """The dead letter that was being handled is kept and replayed again. Those handled before it are not."""
    folder = filled(tmp_path / "box", dead_letter("1"), dead_letter("2"), dead_letter("3"))
    replayed: list[bytes] = []

    def interrupt_second_call(delivery: Delivery) -> None:
        replayed.append(delivery.records[0].data)
        if len(replayed) == 2:
            raise KeyboardInterrupt

    for _ in range(2):
        with HandlerCaller(interrupt_second_call) as handler_calls:
            try:
                replay(open_dead_letters(url(folder)), handler_calls.deliver, lambda *_: None)
            except KeyboardInterrupt:
                assert len(list(folder.iterdir())) == 2
    assert (replayed, list(folder.iterdir())) == ([b"1", b"2", b"2", b"3"], [])


def test_file_that_is_not_a_dead_letter_is_kept_and_reported(tmp_path: Path) -> None:
    folder = filled(tmp_path / "box", dead_letter("1"))
    (folder / "notes.txt").write_text("mine")
    (folder / dead_letter("2").name).write_text("{")
    (folder / ".half.unfinished").write_text("")
    result = CliRunner().invoke(app, ["replay", url(folder), "--handler", "gc:unfreeze"])
    assert result.exit_code == 2  # `gc.unfreeze` does not accept a batch.
    result = CliRunner().invoke(app, ["replay", url(folder), "--handler", f"{__name__}:taken", "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"done": 1, "failed": 0, "strange": 2})
    assert "notes.txt stays: its name is not that of a dead letter" in result.stderr
    assert "it is not a dead letter: it is not JSON" in result.stderr


def taken(_delivery: Delivery) -> None:
    """A handler that accepts every batch."""


def test_replay_reports_the_outcome_of_each_dead_letter(tmp_path: Path) -> None:
    folder = filled(tmp_path / "box", dead_letter("1"))
    result = CliRunner().invoke(app, ["replay", url(folder), "--handler", f"{__name__}:taken"])
    assert (result.exit_code, result.stdout) == (0, "1 dead letter: 1 processed and removed, 0 failed again and stay\n")


SECRET = "hunter2"  # noqa: S105  a made-up password
TAKEN, STORE = ("--handler", "json:dumps"), ("--store", "memory://x")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["file:///nowhere/at/all"], 2, "choose one of --handler module:function and --to"),
        (["file:///nowhere/at/all", *TAKEN], 1, "there is no folder '/nowhere/at/all'"),
        (["file://", *TAKEN], 2, "it names no folder"),
        (["kinesis://letters", *TAKEN], 2, "dead letters in a stream need --store"),
        (["file:///tmp", *TAKEN, *STORE], 2, "--store: it is only for dead letters in a stream"),
        (["file:///tmp", *TAKEN, "--from", "now-1h"], 2, "--from: it is only for dead letters in a stream"),
        (["kinesis://letters", *TAKEN, *STORE, "--from", "LATEST"], 2, "--from: a replay begins at TRIM_HORIZON"),
        (["kinesis://letters", *TAKEN, *STORE, "--from", "soon"], 2, "--from: 'soon' is neither"),
        (["kinesis://a?region=x", *STORE, "--to", "kinesis://a"], 2, "--to: the dead letters are in this stream"),
        (["kinesis://a", *STORE, "--to", "kinesis://a?region=x"], 2, "--to: the dead letters are in this stream"),
        (["ftp://x", *TAKEN], 2, "letters URL: unknown scheme 'ftp'"),
        ([f"s3://key:{SECRET}@bucket/p", *TAKEN], 2, "credentials do not belong in it"),
        ([f"s3://b/p?endpoint=http://k:{SECRET}@h", *TAKEN], 2, "credentials do not belong in it"),
    ],
)
def test_bad_usage_of_replay_is_one_sentence(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert (result.exit_code, result.stdout) == (status, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert SECRET not in result.stderr


SIMILAR_LETTERS = st.builds(
    DeadLetterEntry,
    table=st.sampled_from(["dynamodb://app", "dynamodb://app?region=eu-west-1"]),
    stream=st.sampled_from(["orders", "ns/orders/$Default"]),
    shard=st.sampled_from(["shardId-000000000000", "shardId-000000000001"]),
    lease=st.just("shardId-000000000000"),
    record=st.builds(
        Record,
        st.sampled_from([b"", b"poison", b"poison\n"]),
        st.just("1"),
        st.sampled_from([0, 1]),
        partition_key=st.sampled_from([None, "", "k"]),
        explicit_hash_key=st.sampled_from([None, "7"]),
        arrived=st.sampled_from([None, 1.5, 1.501]),
        token=st.sampled_from(["", "12"]),
        aggregated=st.just(False),
        event=st.none(),
    ),
    error=TEXTS,
    text=TEXTS,
    attempts=st.integers(0, 9),
    worker=st.sampled_from(["w-1", "w-2"]),
    time_ms=st.integers(0, 9),
    source=st.sampled_from(["kinesis://orders?region=eu-west-1", "kinesis://orders?region=us-east-1"]),
)
"""Dead letters of several groups, streams and shards. Most have the same ids and sequence numbers."""


def without_attempt_fields(dead_letter: DeadLetterEntry) -> DeadLetterEntry:
    """Return the dead letter without the fields that may differ between two failures of the same record."""
    return evolve(dead_letter, error="", text="", attempts=0, worker="", time_ms=0)


def stored_in_a_folder(entries: list[DeadLetterEntry]) -> list[DeadLetterEntry]:
    """Write all dead letters to a folder, and return those stored there."""
    with TemporaryDirectory() as folder:
        return write_each_letter_twice(FolderSink(Path(folder)), entries)


def stored_in_a_folder_without_links(entries: list[DeadLetterEntry]) -> list[DeadLetterEntry]:
    """Write all dead letters to a folder of a file system without hard links, and return those stored there."""
    no_links_error = OSError(errno.EPERM, "no links")
    with TemporaryDirectory() as folder, patch.object(Path, "hardlink_to", side_effect=no_links_error):
        return write_each_letter_twice(FolderSink(Path(folder)), entries)


def stored_in_a_bucket(entries: list[DeadLetterEntry]) -> list[DeadLetterEntry]:
    """Write all dead letters to a bucket, and return those stored there."""
    bucket: Any = Bucket()
    return write_each_letter_twice(ObjectSink(bucket, "dead/"), entries)


def write_each_letter_twice(sink: FolderSink | ObjectSink, entries: list[DeadLetterEntry]) -> list[DeadLetterEntry]:
    """Write all dead letters, write each again as another worker, and return those stored in the sink."""
    for entry in (*entries, *(evolve(entry, worker="w-3", attempts=11, text="again") for entry in entries)):
        sink.put(entry)
    assert all(sort_key_of(name) for name in sink.names())
    return [dead_letter_from(sink.get(name) or b"") for name in sink.names()]


@pytest.mark.parametrize("store_in", [stored_in_a_folder, stored_in_a_folder_without_links, stored_in_a_bucket])
@given(entries=st.lists(SIMILAR_LETTERS, max_size=12))
def test_each_distinct_dead_letter_is_stored_once_by_many_workers(
    store_in: Callable[[list[DeadLetterEntry]], list[DeadLetterEntry]], entries: list[DeadLetterEntry]
) -> None:
    stored_entries = [without_attempt_fields(entry) for entry in store_in(entries)]
    assert sorted(stored_entries, key=repr) == sorted({without_attempt_fields(entry) for entry in entries}, key=repr)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("kinesis://o?region=eu-west-1", "dynamodb://t"), ("kinesis://o?region=us-east-1", "dynamodb://t")),
        (("kinesis://o?endpoint=http://a:1", "dynamodb://t"), ("kinesis://o?endpoint=http://b:1", "dynamodb://t")),
        (("eventhubs://n/h?group=a", "memory://t"), ("eventhubs://n/h?group=b", "memory://t")),
        (("kinesis://o", "dynamodb://t?region=eu-west-1"), ("kinesis://o", "dynamodb://t?region=us-east-1")),
        (("kinesis://o", "azblob://a/c?prefix=p"), ("kinesis://o", "azblob://a/c?prefix=q")),
        (("kinesis://o", "azblob://a/c?eventhub=n/h&group=a"), ("kinesis://o", "azblob://a/c?eventhub=n/h&group=b")),
    ],
)
def test_groups_that_differ_by_a_url_option_have_separate_dead_letters(
    one: tuple[str, str], other: tuple[str, str], tmp_path: Path
) -> None:
    for source, store in (one, one, other):
        open_dead_letter(url(tmp_path), source, store)(delivery(), ValueError("poison"))
    stored_dead_letters = [dead_letter_from(file.read_bytes()) for file in tmp_path.iterdir()]
    assert sorted((entry.source, entry.table) for entry in stored_dead_letters) == sorted([one, other])


def test_url_options_that_name_no_place_do_not_duplicate_dead_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a group share its dead letters even if they have different options for reading."""
    monkeypatch.chdir(tmp_path)
    for source, store in (
        ("kinesis://o?region=eu-west-1&endpoint=http://a:1&poll_seconds=1", "sqlite://leases.db"),
        ("kinesis://o?endpoint=http://a:1&consumer=c&region=eu-west-1", f"sqlite://{tmp_path}/leases.db"),
    ):
        open_dead_letter("file://dead", source, store)(delivery(), ValueError("poison"))
    (file,) = (tmp_path / "dead").iterdir()
    stored_dead_letter = dead_letter_from(file.read_bytes())
    assert stored_dead_letter.source == "kinesis://o?region=eu-west-1&endpoint=http://a:1"
    assert stored_dead_letter.table == f"sqlite://{tmp_path}/leases.db"


def delivery() -> Delivery:
    """Return a batch of one record."""
    record = dead_letter("7").record
    return Delivery((record,), record.position, None, DeadLetterHolding.of(dead_letter("7")), None, 3)


def test_dead_letter_of_an_earlier_version_is_replayed(tmp_path: Path) -> None:
    fields = json.loads(dead_letter("7").line)
    del fields["source"]
    name = "7-0-s-0-0123456789ab.json"
    (tmp_path / name).write_text(json.dumps(fields) + "\n")
    replayed = list[DeadLetterEntry]()
    assert replay(FolderSink(tmp_path), replayed.append, lambda *_: None) == ReplayVerdict(done=1)
    assert (replayed, list(tmp_path.iterdir())) == ([dead_letter("7")], [])


def test_replay_continues_after_unreadable_dead_letters(tmp_path: Path) -> None:
    sink = FolderSink(tmp_path)
    for number in ("1", "3", "5"):
        sink.put(dead_letter(number))
    unreadable_files = tmp_path / "2-0-s-0-0123456789ab.json", tmp_path / "4-0-s-0-0123456789ab.json"
    unreadable_files[0].mkdir()
    unreadable_files[1].write_bytes(b"\xff")
    result = CliRunner().invoke(app, ["replay", url(tmp_path), "--handler", "builtins:print", "--json"])
    assert json.loads(result.stdout.splitlines()[-1]) == {"done": 3, "failed": 0, "strange": 2}
    assert result.exit_code == 1
    first_line, second_line = result.stderr.splitlines()
    assert first_line.startswith(
        f"leasehold replay: {unreadable_files[0].name} stays: a dead letter could not be read: "
    )
    assert second_line == f"leasehold replay: {unreadable_files[1].name} stays: it is not a dead letter: it is not JSON"
    assert sorted(tmp_path.iterdir())[:2] == sorted(unreadable_files)
