"""Readers in processes of their own: what they report, what the planner makes of it, and what remains when one dies."""

import io
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import IO, ClassVar, Never

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from attrs import evolve
from fake_stream import FakeReader, Place, Stream, options, rows_of
from killed_reader import read as written
from reader_pools import (
    HELLO,
    HOST,
    PATIENCE,
    a_pool,
    a_spec,
    closed_by_pool,
    connected,
    numbers,
    opened,
    read_for_ever,
)
from row_servers import answering

from leasehold.adapters.json_form import BadJsonField
from leasehold.adapters.spark.event_hubs.options import event_hubs_options
from leasehold.adapters.spark.fetching import HERE, FetchedRows, Kept, ReaderRows, Transport, read, spread
from leasehold.adapters.spark.kinesis.options import kinesis_options
from leasehold.adapters.spark.kinesis.rows import columns
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers import pool as connection
from leasehold.adapters.spark.readers import pool as far_transport
from leasehold.adapters.spark.readers import pool as pool_module
from leasehold.adapters.spark.readers import reader
from leasehold.adapters.spark.readers.messages import (
    LINE_BYTES,
    Alive,
    FromReader,
    Keep,
    Open,
    Piece,
    ShardFailure,
    ShardReport,
    from_reader,
    line_of,
)
from leasehold.adapters.spark.readers.pool import FarBuffer, FarReader, FarTransport, QueryReaders, ReaderPool, way_of
from leasehold.adapters.spark.readers.reader import FAULT_SECONDS, ROOM_SECONDS, ShardReadAhead, ShardReader
from leasehold.adapters.spark.replay import Place as ReplayPlace
from leasehold.adapters.spark.rows import Chunk, SourceSpec
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import SourceError, SourceUnavailable
from leasehold.stores.embedded.memory import MemoryStore


def pieces(*ends: int, rows: int = 1) -> tuple[Piece, ...]:
    return tuple(Piece(rows, 100 * rows, Position(str(end))) for end in ends)


def reported(*ends: int, rows: int = 1, opening: int = 1) -> ShardReport:
    """Report a reading that returned these records."""
    return ShardReport(opening, pieces(*ends, rows=rows), 0.0, 10)


def an_opening(closed: Callable[[FarReader], None] = lambda _reader: None) -> FarReader:
    """Return an opening of a shard, from its oldest record."""
    return FarReader(1, Lease("a", epoch=7), TRIM_HORIZON, closed)


# What is reported


def test_a_report_is_taken_in_whole_pieces_that_say_their_ranges() -> None:
    """A batch ends only between pieces, where the position is known."""
    opening, buffer = an_opening(), FarBuffer(columns("fake"))
    opening.report(reported(3, 6, rows=3))
    opening.report(reported(9, rows=3))
    batch = opening.read()
    assert (batch.count, batch.end, batch.behind_seconds, batch.size) == (9, Position("9"), 0.0, 20)
    assert opening.read().behind_seconds is None  # nothing new, so nothing was answered
    buffer.put(Chunk(batch.rows, Position("9")))  # type: ignore[attr-defined]  # it is one of columns
    assert buffer.take(2, 1 << 20) is None
    first, rest = buffer.take(6, 600), buffer.take(9, 1 << 62)  # neither a row nor a byte more
    assert first is not None
    assert rest is not None
    chunks = [(chunk.count, chunk.rows.range.begins, chunk.ends, chunk.rows.through) for chunk in (first, rest)]
    assert chunks == [(6, TRIM_HORIZON, Position("6"), 2), (3, Position("6"), Position("9"), 3)]
    assert (first.rows.range.epoch, bool(buffer), buffer.count, buffer.bytes) == (7, False, 0, 0)


@pytest.mark.parametrize("ends", [(3, 2), (3, 3)], ids=["before", "again"])
def test_a_report_of_another_range_is_refused(ends: tuple[int, ...]) -> None:
    """A faulty reader cannot add rows twice or move a checkpoint back."""
    opening = an_opening()
    with pytest.raises(ValueError, match="was reported behind 3"):
        opening.report(reported(*ends))


def test_an_opening_whose_reader_is_gone_brings_nothing_more() -> None:
    """Rows that were lost with their reader are not planned."""
    opening, buffer = an_opening(), FarBuffer(columns("fake"))
    opening.report(reported(1))
    batch = opening.read()
    buffer.put(Chunk(batch.rows, Position("1")))  # type: ignore[attr-defined]  # as above
    opening.report(reported(2))
    before = buffer.gone
    opening.gone = True
    assert (before, buffer.gone) == (False, True)
    with pytest.raises(SourceUnavailable):
        opening.read()


def test_a_shard_that_a_reader_cannot_read_is_refused_after_what_was_reported() -> None:
    """The planner learns that a shard cannot be read, so it does not take it for a quiet one."""
    opening = an_opening()
    opening.report(reported(1))
    opening.fail("no such stream")
    assert opening.read().count == 1
    with pytest.raises(SourceError, match="no such stream"):
        opening.read()


# A shard that is read ahead


def test_a_reader_reads_ahead_within_its_room_and_reports_pieces() -> None:
    """A reader reads no further ahead than its room allows, so a blocked sink does not fill its memory."""
    reports: list[FromReader] = []
    stream = Stream({"a": [str(number) for number in range(30)]})
    ahead = ShardReadAhead(
        Open(4, Lease("a"), TRIM_HORIZON), stream, a_spec(stream, rows=15), reports.append, lambda: 1
    )
    for now in range(5):
        ahead.step(float(now))
    reported_pieces = [(piece.rows, piece.ends.sequence) for each in reports for piece in each.pieces]  # type: ignore[union-attr]
    assert stream.readings == 2
    assert reported_pieces == [(3, "3"), (3, "6"), (3, "9"), (1, "10"), (3, "13"), (3, "16"), (3, "19"), (1, "20")]
    assert ahead.step(5.0) == 5.0 + ROOM_SECONDS
    taken = ahead.take(2)
    assert taken is not None
    assert [number for rows in taken for number in rows["sequenceNumber"].to_pylist()] == list("123456")
    assert ahead.take(9) is None  # more than it has
    ahead.step(9.0)
    assert stream.readings == 3
    ahead.close()
    assert (ahead.take(3), ahead.step(10.0)) == (None, math.inf)


def test_a_shelf_waits_for_faults_that_lie_far_apart_as_for_the_first() -> None:
    """Errors add up to a longer wait only if they follow one another closely."""
    stream, waits = Stream({"a": []}), list[float]()
    ahead = ShardReadAhead(Open(1, Lease("a"), TRIM_HORIZON), stream, a_spec(stream), lambda _message: None, lambda: 1)
    for now in range(200):
        stream.late["a"] = now % 2
        due = ahead.step(float(now))
        waits += [due - now] if now % 2 else []
    least, most = FAULT_SECONDS
    assert least <= min(waits) <= max(waits) <= 3 * least < most


def test_a_reading_without_an_answer_is_not_reported() -> None:
    """A shard whose reads are throttled is not taken for one that is read up."""
    reports: list[FromReader] = []
    stream = Stream({"a": []}, silent={"a"})
    ahead = ShardReadAhead(Open(1, Lease("a"), TRIM_HORIZON), stream, a_spec(stream), reports.append, lambda: 1)
    ahead.step(0.0)
    stream.silent.clear()
    ahead.step(1.0)
    assert reports == [ShardReport(1, (), 0.0, 0)]


def test_the_end_of_a_shard_is_reported_once_it_is_read() -> None:
    """The children of a shard are read only after its end was reported."""
    reports: list[FromReader] = []
    stream = Stream({"a": ["x"], "b": []}, {"a": ("b",)})
    ahead = ShardReadAhead(Open(1, Lease("a"), TRIM_HORIZON), stream, a_spec(stream), reports.append, lambda: 1)
    dues = [ahead.step(0.0), ahead.step(1.0)]
    assert dues[1] == math.inf
    last = reports[-1]
    assert isinstance(last, ShardReport)
    assert (last.ended, last.pieces[-1].ends) == (True, SHARD_END)


def test_a_reader_tells_of_a_shard_that_it_may_not_read() -> None:
    """The planner then gives up the lease, so that another worker can read the shard."""
    reports: list[FromReader] = []
    stream = Stream({"a": []})
    ahead = ShardReadAhead(Open(1, Lease("a"), TRIM_HORIZON), Refusing({}), a_spec(stream), reports.append, lambda: 1)
    assert (ahead.step(0.0), reports) == (math.inf, [ShardFailure(1, "access denied")])


class Refusing(Stream):
    """A stream that rejects every read."""

    def open(self, _lease: Lease, _start: Position) -> Never:
        raise SourceError("access denied")


# The pool


@contextmanager
def a_reader(pool: ReaderPool, stream: Stream, size: int = 1 << 20, folder: str = "") -> Iterator[None]:
    """Return a reader in a thread, which ends with the pool."""
    spec = evolve(a_spec(stream, pool), bytes=size, folder=folder)
    thread = Thread(target=ShardReader(spec).run)
    thread.start()
    try:
        yield
    finally:
        pool.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "said",
    [bytes(32) + HELLO, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n\r\n\r\n", HELLO * 3],
    ids=["another token", "another protocol", "no token"],
)
def test_without_the_token_nobody_becomes_a_reader(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reaches the port cannot take a query's shards or report rows without the token."""
    for module, name in ((pool_module, "REQUEST_SECONDS"), (connection, "SILENT_SECONDS")):
        monkeypatch.setattr(module, name, 100 * PATIENCE)  # no connection closes by a timeout
    with a_pool() as (pool, _), connected(pool, said) as stranger:
        assert closed_by_pool(stranger)
        assert pool.connected == ()


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\xff\n",
        line_of(Alive()),
        HELLO + HELLO,
        HELLO + b'{"ShardReport": 1}\n',
        HELLO + line_of(Alive())[:-1],
        HELLO + b"x" * (LINE_BYTES + 1),
    ],
    ids=["no text", "no Hello", "two Hellos", "no message", "half a line", "no end"],
)
def test_a_reader_that_says_what_no_reader_says_is_let_go(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One faulty reader neither ends the query nor leaves it waiting."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 100 * PATIENCE)  # no connection closes by a timeout
    with a_pool() as (pool, news), connected(pool, pool.token + HELLO) as good:
        opening = opened(pool)
        with connected(pool, pool.token + said) as bad:
            if said.count(b"\n") < 2 and len(said) <= LINE_BYTES and said.startswith(HELLO):
                bad.shutdown(socket.SHUT_WR)  # the rest of a half line may still come
            assert closed_by_pool(bad)
        good.sendall(line_of(reported(5, opening=opening.number)))
        assert news.event.wait(PATIENCE)
        assert (opening.gone, opening.read().count) == (False, 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{}", "one field"),
        (b'{"Alive":[],"BatchKept":1}', "one field"),
        (b'{"Alive":[1]}', "Alive: [1] is not a list of 0"),
        (b'{"Hello":["h",0,"00"]}', "Hello[1]: 0 is not between"),
        (b'{"Hello":["h",1,"zz"]}', "Hello[2]"),
        (b'{"ShardReport":[1,[[1,1,["x",0,""]]],0,0,false,[]]}', "ShardReport[1][0][2][0]"),
        (b'{"ShardReport":[1,[[1,1,["1",-1,""]]],0,0,false,[]]}', "ShardReport[1][0][2][1]"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(line: bytes, said: str) -> None:
    """A message of another version is rejected with the reason, not half understood."""
    with pytest.raises(BadJsonField) as refused:
        from_reader(line)
    assert said in str(refused.value)


def test_a_token_that_cannot_be_read_is_refused_and_not_shown() -> None:
    """A damaged token does not reach the planner's log."""
    with pytest.raises(BadJsonField, match=r"^Hello\[2\]: is not bytes to the base of sixteen$"):
        from_reader(b'{"Hello":["10.0.0.7",40000,"5ec4e7z"]}\n')


def test_a_reader_that_reports_another_range_is_let_go_with_its_shards() -> None:
    """The rejected reader's shards are read by other readers."""
    with a_pool() as (pool, news), connected(pool, pool.token + HELLO) as bad:
        opening = opened(pool)
        bad.sendall(line_of(reported(3, 2, opening=opening.number)))
        assert news.event.wait(PATIENCE)
        assert opening.gone
        with pytest.raises(SourceUnavailable):
            opening.read()


def test_a_reader_that_dies_within_a_report_loses_its_shards_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """A report that was cut off does not count, and the shards of the dead reader are read by others."""
    with a_pool() as (pool, news):
        with connected(pool, pool.token + HELLO) as dying:
            opening = opened(pool)
            news.look = lambda: opening.gone  # it is gone by the time of the news
            dying.sendall(line_of(reported(3, opening=opening.number))[:-5])
        assert news.event.wait(PATIENCE)
        assert (opening.gone, news.seen) == (True, [True])
        with connected(pool, pool.token + HELLO):
            assert not opened(pool).gone
            # Counted before this reader goes too, because that logs the same line.
            assert caplog.text.count("is gone: its 1 shards are read by others") == 1


def test_once_its_query_ends_a_pool_takes_nobody_in_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a query does not wait for readers, and a reader that connects later is turned away."""
    for name in ("FIRST_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(pool_module, name, 100 * PATIENCE)  # no connection closes by a timeout
    with a_pool() as (pool, _):
        pool.stop()
        with pytest.raises(SourceUnavailable):
            opened(pool)
        with connected(pool, pool.token + HELLO) as late:
            assert closed_by_pool(late)
            assert pool.connected == ()


def test_a_reader_that_hangs_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that sends nothing for too long loses its shards to others."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.05)
    with a_pool() as (pool, news), connected(pool, pool.token + HELLO) as hanging:
        opening = opened(pool)
        assert news.event.wait(PATIENCE)
        assert opening.gone
        assert hanging.recv(1 << 16).startswith(b'{"Open":')


def test_a_peer_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-open connection does not keep a thread and a descriptor forever."""
    monkeypatch.setattr(pool_module, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(connection, "SILENT_SECONDS", 100 * PATIENCE)
    with a_pool() as (pool, _), connected(pool, b"") as silent:
        assert closed_by_pool(silent)


def test_a_reader_that_went_is_not_waited_for_as_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first reader is waited for; the shards of a dead reader do not each block a thread of the query."""
    monkeypatch.setattr(pool_module, "FIRST_SECONDS", 2 * PATIENCE)
    with a_pool() as (pool, news):
        with connected(pool, pool.token + HELLO):
            opened(pool)
        assert news.event.wait(PATIENCE)
        monkeypatch.setattr(pool_module, "FIRST_SECONDS", 0.0)
        waited = Event()

        def refused() -> None:
            with pytest.raises(SourceUnavailable):
                opened(pool)
            waited.set()

        Thread(target=refused, daemon=True).start()
        assert waited.wait(pool_module.NEXT_SECONDS + PATIENCE)


@pytest.mark.parametrize("dies", [False, True])
def test_a_reader_that_does_not_say_that_it_keeps_a_batch_is_waited_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, dies: bool
) -> None:
    """A stuck reader delays a batch only until the timeout, and a reader that is gone not at all."""
    monkeypatch.setattr(far_transport, "KEPT_SECONDS", 100 * PATIENCE if dies else 0.05)
    with a_pool() as (pool, news), connected(pool, pool.token + HELLO) as mute:
        place = ReplayPlace(MemoryStore(), Stream({"a": ["x"]}), columns("fake"), exclusive=False)
        transport = FarTransport(pool, Transport(Address(HOST, HOST), 1 << 20, str(tmp_path)), place, 10.0)
        opening = opened(pool)
        mute.sendall(line_of(reported(1, opening=opening.number)))
        assert news.event.wait(PATIENCE)
        rows = opening.read().rows  # type: ignore[attr-defined]  # it is one of columns
        told = mute.makefile("rb")
        assert told.readline().startswith(b'{"Open":')
        heard: list[bytes] = []

        def hear() -> None:
            heard.append(told.readline())
            if dies:
                mute.shutdown(socket.SHUT_RDWR)

        hearing = Thread(target=hear)
        hearing.start()
        (part,) = transport.partitions(1, [[rows]])
        hearing.join(PATIENCE)
        assert isinstance(part, ReaderRows)
        assert (len(part.parts), part.count) == (1, 1)
        assert heard == [line_of(Keep(1, ((0, ((opening.number, 1),)),)))]
        transport.close()


@contextmanager
def a_planner(stream: Stream) -> Iterator[tuple[socket.socket, IO[bytes], Thread]]:
    """Return a planner's connection, what the reader sends after its Hello, and the reader."""
    with socket.create_server((HOST, 0)) as listening:
        spec = evolve(a_spec(stream), planner=listening.getsockname()[:2], token=b"secret")
        thread = Thread(target=ShardReader(spec).run)
        thread.start()
        planner, _ = listening.accept()
        with planner, planner.makefile("rb") as messages:
            assert messages.read(len(b"secret")) == b"secret"
            assert messages.readline().startswith(b'{"Hello"')
            yield planner, messages, thread
            planner.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert stream.closed


def test_a_reader_says_again_and_again_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of quiet shards sends heartbeats, so it is not taken for dead."""
    monkeypatch.setattr(reader, "ALIVE_SECONDS", 0.01)
    with a_planner(Stream({})) as (_, said, _thread):
        assert [said.readline() for _ in range(3)] == [line_of(Alive())] * 3


def test_a_reader_ends_though_a_reading_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor's slot is freed even while a read hangs."""
    monkeypatch.setattr(reader, "END_SECONDS", 0.05)
    reads, over = Event(), Event()

    def waits(_reader: FakeReader) -> Never:
        reads.set()
        over.wait()
        raise SourceUnavailable("at last")

    monkeypatch.setattr(FakeReader, "read", waits)
    stream = Stream({"a": []})
    with a_planner(stream) as (planner, _, _thread):
        planner.sendall(line_of(Open(1, Lease("a"), TRIM_HORIZON)))
        assert reads.wait(PATIENCE)
    over.set()


def test_a_reader_whose_disk_is_full_goes_on_and_leaves_its_tasks_to_the_planner(tmp_path: Path) -> None:
    """If a reader cannot keep a batch, tasks fetch its rows from the planner."""
    stream = Stream({"a": ["x" * 1000] * 25})
    with planned(stream, tmp_path, size=28_000, folder="/not/here") as (pool, _, part):
        assert numbers(read(part)) == list(range(1, 26))
        assert len(pool.connected) == 1


def test_a_late_report_counts_for_nothing() -> None:
    """A shard that was taken away and given back does not begin with rows of its earlier reading."""
    with a_pool() as (pool, news), connected(pool, pool.token + HELLO) as late:
        first = opened(pool)
        first.close()
        second = opened(pool)
        late.sendall(line_of(reported(7, opening=first.number)) + line_of(reported(3, opening=second.number)))
        assert news.event.wait(PATIENCE)
        assert (first.gone, second.read().end) == (True, Position("3"))


def test_a_reader_that_comes_later_gets_its_part_of_the_shards() -> None:
    with a_pool() as (pool, news), connected(pool, pool.token + HELLO):
        before = [pool.open(Lease(key), TRIM_HORIZON) for key in "abcd"]
        with connected(pool, pool.token + HELLO):
            assert news.event.wait(PATIENCE)
            assert [each.gone for each in before] == [False, False, True, True]
            again = [pool.open(Lease(key), TRIM_HORIZON) for key in "cd"]
            assert pool.reader_of(again[0]) is pool.reader_of(again[1]) is not pool.reader_of(before[0])


def test_a_shard_that_nobody_could_read_is_woken_when_a_reader_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that no reader could read are retried as soon as a reader connects."""
    monkeypatch.setattr(pool_module, "FIRST_SECONDS", 0.01)
    with a_pool() as (pool, news):
        with pytest.raises(SourceUnavailable, match="no process that reads is connected"):
            opened(pool)
        with connected(pool, pool.token + HELLO):
            assert news.event.wait(PATIENCE)
            assert news.keys == ["a"]


# Their rows


@contextmanager
def planned(
    stream: Stream, tmp_path: Path, size: int = 1 << 20, folder: str = ""
) -> Iterator[tuple[ReaderPool, FarTransport, ReaderRows]]:
    """Plan a batch of all records of shard a, as one task, with this room and folder for the reader."""
    with a_pool() as (pool, news), a_reader(pool, stream, size, folder):
        place = ReplayPlace(MemoryStore(), stream, columns("fake"), exclusive=False)
        transport = FarTransport(pool, Transport(Address(HOST, HOST), 1 << 20, str(tmp_path)), place, 10.0)
        opening, buffer = opened(pool), FarBuffer(columns("fake"))
        while buffer.count < len(stream.records["a"]):
            assert news.event.wait(PATIENCE)
            news.event.clear()
            batch = opening.read()
            if batch.count:
                buffer.put(Chunk(batch.rows, batch.end))  # type: ignore[attr-defined, arg-type]  # it is of columns
        chunk = buffer.take(100, 1 << 20)
        assert chunk is not None
        (part,) = transport.partitions(1, spread({"a": chunk.rows}, 1))
        assert isinstance(part, ReaderRows)
        yield pool, transport, part
        transport.close()


def test_a_task_has_its_rows_from_the_reader_as_often_as_it_asks(tmp_path: Path) -> None:
    """Tasks fetch rows from the reader, so a batch is read from the stream only once."""
    stream = Stream({"a": ["x"] * 25})
    with planned(stream, tmp_path) as (_, transport, part):
        before = len(stream.opened)
        assert [numbers(read(part)) for _ in range(2)] == [list(range(1, 26))] * 2
        assert len(stream.opened) == before
        assert part.parts[0].token.hex() not in repr(part)
        transport.discard(1)
        with pytest.raises(RuntimeError, match="batch 1 is done"):
            read_for_ever(part)


def test_a_task_whose_reader_is_gone_has_exactly_its_rows_from_the_planner(tmp_path: Path) -> None:
    """The planner reads exactly the rows of the offset again, so the query goes on."""
    stream = Stream({"a": ["x"] * 25})
    with planned(stream, tmp_path) as (pool, _, part):
        stream.put("a", "later")
        for reader in pool.connected:
            reader.end()
        dead = evolve(part, parts=tuple(evolve(each, port=closed_port()) for each in part.parts))
        assert numbers(read(dead)) == list(range(1, 26))


def closed_port() -> int:
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


def test_a_task_goes_on_where_its_reader_died(tmp_path: Path) -> None:
    """A task that has already passed on rows fetches only the rest."""
    with planned(Stream({"a": ["x"] * 25}), tmp_path) as (_, _transport, part):
        whole = pa.concat_batches(list(read(part)))
        with io.BytesIO() as written:
            Kept.of([whole.slice(0, 4), whole.slice(4, 3)]).write(written)
            cut = written.getvalue()[:-20]
        with answering(HERE + cut) as half:
            assert numbers(read(evolve(part, parts=(half,)))) == list(range(1, 26))


def test_rows_that_cannot_be_read_again_fail_the_task(tmp_path: Path) -> None:
    """The checkpoint marks no rows as done that no sink has."""
    stream = Stream({"a": ["x"] * 25})
    with planned(stream, tmp_path) as (_, _transport, part):
        stream.trimmed["a"] = 5
        with pytest.raises(
            RuntimeError, match=r"cannot be read again: ValueError: shard a: of 25 rows that were planned"
        ):
            numbers(read(evolve(part, parts=())))


@pytest.mark.parametrize("count", [24, 26])
def test_a_reader_that_sends_another_number_of_rows_fails_the_task(tmp_path: Path, count: int) -> None:
    with planned(Stream({"a": ["x"] * 25}), tmp_path) as (_, transport, part):
        transport.discard(2)
        other = evolve(part, count=count, again=evolve(part.again, number=9))
        with pytest.raises(RuntimeError, match=r"25 rows came of 24 that were planned|batch 9 is done"):
            numbers(read(other))


# As child processes of a query


def the_readers(parent: int) -> list[int]:
    """Return the reader processes of this process."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if ours and b"leasehold.adapters.spark.readers.process" in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def records(count: int) -> dict[str, list[str]]:
    return {key: [f"{key}{number}" for number in range(count)] for key in "abc"}


def whole(stream: Stream) -> list[tuple[str, int, str]]:
    return sorted((key, number, text) for key, texts in stream.records.items() for number, text in enumerate(texts, 1))


@pytest.mark.slow
def test_a_query_by_readers_brings_every_record_once_though_they_are_killed(tmp_path: Path) -> None:
    place = Place(Stream(records(60)), tmp_path / "leases.db")
    query = place.query(**{"lease.readers": "2", "maxRowsPerTrigger": "40"})  # type: ignore[arg-type]  # no argument's name
    sizes, kills = [], 0
    try:
        while len(query.rows) < 180:
            end = query.plan_patiently()
            if query.offset["n"]:
                query.reader.commit(query.offset)
            parts = query.reader.partitions(query.offset, end)
            if kills < 2:
                for reader in the_readers(os.getpid())[: 1 + kills]:  # one of the two, then both
                    os.kill(reader, signal.SIGKILL)
                kills += 1
            rows = query.run(end)
            assert rows == sorted(row for part in parts for batch in query.reader.read(part) for row in rows_of(batch))
            sizes.append(len(rows))
            query.offset = end
        query.until(lambda query: query.checkpoints() == dict.fromkeys("abc", "60"))
    finally:
        place.close()
    assert (sorted(query.rows), kills, max(sizes) <= 40) == (whole(place.stream), 2, True)
    assert the_readers(os.getpid()) == []


@pytest.mark.slow
def test_a_query_that_is_killed_leaves_no_reader_and_repeats_the_same(tmp_path: Path) -> None:
    """Readers end with their query, and the repeated batch has the same rows, as the sink may skip it."""
    for kind in ("offsets", "commits", "sink", "repeated"):
        (tmp_path / kind).mkdir()
    stream = Stream(records(15))
    (tmp_path / "stream.json").write_text(json.dumps(stream.records))
    command = [sys.executable, str(Path(__file__).with_name("killed_reader.py")), str(tmp_path)]
    for how in ("stops", "lives"):
        with subprocess.Popen([*command, how, "1"], stdout=subprocess.PIPE) as life:
            if how == "stops":
                assert life.stdout is not None
                assert life.stdout.readline() == b"stopped\n"
                readers = [os.pidfd_open(reader) for reader in the_readers(life.pid)]
                life.kill()
                ended = [select.select([reader], [], [], PATIENCE)[0] for reader in readers]
                assert (len(ended), all(ended)) == (1, True)
            assert life.wait() == (-signal.SIGKILL if how == "stops" else 0)
    sink = [tuple(row) for rows in written(tmp_path, "sink").values() for row in rows]
    assert list(written(tmp_path, "repeated").values()) == [True]
    assert sorted(sink) == whole(stream)


@pytest.mark.slow
def test_children_of_a_shard_are_read_by_readers_once_its_end_is_committed(tmp_path: Path) -> None:
    """A resharded stream is read in order, parents before children."""
    stream = Stream({"a": ["x"] * 25})
    stream.split("a", "b", "c")
    stream.put("b", *["y"] * 5)
    stream.put("c", *["z"] * 5)
    place = Place(stream, tmp_path / "leases.db")
    query = place.query(**{"lease.readers": "1"})  # type: ignore[arg-type]  # likewise
    try:
        while len(query.rows) < 35:
            query.plan_patiently()
            query.batch()
    finally:
        place.close()
    assert sorted(query.rows) == whole(stream)


class Children:
    """Stands in for child processes, and records whether they were begun and ended."""

    told: ClassVar[list[str]] = []

    def __init__(self, *_given: object) -> None:
        """Ignore all arguments."""

    def begin(self) -> None:
        self.told.append("begun")

    def close(self) -> None:
        self.told.append("closed")


@pytest.mark.parametrize("readers", ["0", "1"])
def test_once_a_query_is_closed_nothing_of_it_listens(
    readers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed query leaves no port, process or row behind."""
    monkeypatch.setattr(pool_module, "ReaderChildren", Children)
    monkeypatch.setattr(Children, "told", [])
    stream = Stream({"a": ["x"]})
    source_spec = SourceSpec(lambda: stream, columns("fake"), 0.01, 2**53, rereadable=True)
    place = ReplayPlace(MemoryStore(), stream, columns("fake"), exclusive=False)
    way = way_of(
        source_spec, options(tmp_path / "leases.db", "TRIM_HORIZON", **{"lease.readers": readers}), stream, place
    )
    way.begin(lambda _key: None)
    # Rows that the planner has read itself go by its own transport, with or without readers.
    (rows,) = way.transport.partitions(1, [[pa.RecordBatch.from_pydict({"data": [b"x"]})]])
    assert isinstance(rows, FetchedRows)
    assert [batch.num_rows for batch in read(rows)] == [1]
    way.transport.discard(1)
    with pytest.raises(RuntimeError, match="batch 1 is done"):
        list(read(rows))
    ports = [rows.port, *([way.pool.port] if isinstance(way, QueryReaders) else [])]
    assert (len(ports) - 1, [refused(port) for port in ports]) == (int(readers), [False] * len(ports))
    way.close()
    assert [refused(port) for port in ports] == [True] * len(ports)
    assert Children.told == (["begun", "closed"] if readers == "1" else [])


def refused(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False


# Options


def test_readers_are_refused_where_they_cannot_be() -> None:
    """A query whose tasks could fetch from no reader is refused when it begins."""
    given = {"kinesis.streamName": "s", "lease.store": "sqlite:///s.db", "lease.readers": "2"}
    assert kinesis_options({**given, "lease.fetchHost": HOST}).lease.readers == 2
    with pytest.raises(ValueError, match=r"^option lease\.readers: tasks fetch from readers"):
        kinesis_options({**given, "lease.fetchHost": HOST, "lease.transport": "embedded"})
    with pytest.raises(ValueError, match=r"^option lease\.readers: not supported"):
        event_hubs_options(
            {"eventhubs.namespace": "n", "eventhubs.name": "h", "lease.store": "sqlite:///s.db"}
            | {"lease.readers": "2", "lease.fetchHost": HOST}
        )
