"""When a reader runs the steps of its shards, and what it does and sends once it is over."""

import io
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import ClassVar

import pytest
from attrs import evolve
from fake_stream import Stream
from pyspark import cloudpickle
from reader_pools import HELLO, HOST, PATIENCE, a_pool, a_spec, connected, opened

from leasehold.adapters.json_form import BadJsonField
from leasehold.adapters.spark.readers import process, reader
from leasehold.adapters.spark.readers.jobs import KeptReaders
from leasehold.adapters.spark.readers.messages import LINE_BYTES, Alive, BatchKept, Close, Keep, Open, line_of, lines
from leasehold.adapters.spark.readers.reader import ShardReadAhead, ShardReader
from leasehold.balancer.model import TRIM_HORIZON, Lease


class Inline:
    """Replaces a schedule: a step runs when it is added or woken, in the calling thread."""

    told: ClassVar[list[str]] = []

    def __init__(self, *_given: object) -> None:
        self._steps: dict[str, Callable[[float], float]] = {}
        self.told.clear()

    def add(self, key: str, step: Callable[[float], float]) -> None:
        """Run the step for the first time."""
        self._steps[key] = step
        self.wake(key)

    def wake(self, key: str) -> None:
        """Run the step unless it is over."""
        if key in self._steps and self._steps[key](0.0) == math.inf:
            del self._steps[key]

    def drain(self, _until: float) -> None:
        """Record how many steps are left."""
        self.told.append(f"drained of {len(self._steps)}")

    def close(self, _until: float) -> None:
        self.told.append("closed")


def told_by(stream: Stream, *said: bytes) -> list[bytes]:
    """Return what a reader sends after its Hello to a planner that sends this and then shuts its side down."""
    with socket.create_server((HOST, 0)) as listening:
        spec = evolve(a_spec(stream), planner=listening.getsockname()[:2], token=b"secret")
        thread = threading.Thread(target=ShardReader(spec).run)
        thread.start()
        planner, _ = listening.accept()
        with planner, planner.makefile("rb") as heard:
            assert heard.read(len(b"secret")) == b"secret"
            assert heard.readline().startswith(b'{"Hello"')
            planner.sendall(b"".join(said))
            planner.shutdown(socket.SHUT_WR)  # the reader reads everything up to here
            lines = heard.readlines()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return lines


def test_a_shard_is_closed_by_its_last_step_once_it_is_taken_away_and_once_the_planner_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection of a shard does not stay open while others open the shard."""
    monkeypatch.setattr(reader, "Schedule", Inline)
    monkeypatch.setattr(reader, "ALIVE_SECONDS", PATIENCE)
    stream = Stream({"a": ["x"], "b": ["y"]})
    opens = [line_of(Open(number, Lease(key), TRIM_HORIZON)) for number, key in enumerate("ab", 1)]
    sent = told_by(stream, *opens, line_of(Close(1)), line_of(Keep(9, ())))
    assert sent[-1] == line_of(BatchKept(9))
    assert (stream.readings, stream.open_readers, Inline.told) == (2, [], ["drained of 0", "closed"])


def test_a_reader_that_is_over_says_nothing_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that ends leaves no thread that sends heartbeats, and no warning about its planner."""
    monkeypatch.setattr(reader, "ALIVE_SECONDS", 0.001)
    told_by(Stream({}))
    for thread in threading.enumerate():
        if thread.name == "leasehold-alive":
            thread.join(PATIENCE)
    assert "does not hear" not in caplog.text


def test_a_planner_that_does_not_hear_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that loses its planner warns once, and not once per shard."""
    one = ShardReader(a_spec(Stream({})))
    one._connection = socket.socket()  # noqa: SLF001  one that is connected to nobody
    with caplog.at_level(logging.WARNING), one._connection:  # noqa: SLF001
        one._say(Alive())  # noqa: SLF001
        one._say(Alive())  # noqa: SLF001
    assert caplog.text.count("the planner does not hear") == 1


def test_what_a_planner_says_leaves_at_once() -> None:
    """Readers do not wait for a network acknowledgement before they learn which batch to keep."""
    with a_pool() as (pool, _), connected(pool, pool.token + HELLO):
        opened(pool)
        (one,) = pool.connected
        assert one._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1  # noqa: SLF001


@pytest.mark.parametrize("fault", [None, OSError("the planner cannot be reached")])
def test_a_reader_process_ends_at_once_however_its_reading_ended(
    fault: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for a response of the service does not keep the process alive."""
    told = list[object]()

    class Reading:
        def __init__(self, spec: object) -> None:
            told.append(spec)

        def run(self) -> None:
            if fault is not None:
                raise fault

    monkeypatch.setattr(process, "ShardReader", Reading)
    monkeypatch.setattr(process, "speak", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *given: told.append(given))
    monkeypatch.setattr(os, "_exit", told.append)
    given = io.TextIOWrapper(io.BytesIO(cloudpickle.dumps("what to read")))  # type: ignore[no-untyped-call]  # Spark's
    monkeypatch.setattr(sys, "stdin", given)
    with nullcontext() if fault is None else pytest.raises(OSError, match="cannot be reached"):
        process.main()
    assert told == [(signal.SIGINT, signal.SIG_IGN), "what to read", 0]


def test_readers_that_are_ended_are_not_started_again() -> None:
    """A reader that ends at this moment is not replaced for a query that is closed."""
    over = list[bool]()

    class Noting(KeptReaders):
        def _live(self, place: int) -> str:
            return str(place)

        def _end(self) -> None:
            over.append(self._over.is_set())

    Noting(0).close()
    assert over == [True]


def test_a_batch_is_said_to_be_kept_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks do not come for rows that are not there yet, which the planner would have to read again."""
    calls = list[object]()
    one = ShardReader(a_spec(Stream({})))
    monkeypatch.setattr(one, "_keep", calls.append)
    monkeypatch.setattr(one, "_say", calls.append)
    one._obey(Keep(9, ()))  # noqa: SLF001
    assert calls == [Keep(9, ()), BatchKept(9)]


def test_a_shard_that_is_taken_away_leaves_no_rows_behind() -> None:
    """The rows are dropped at once, even if a long step of the shard is still running."""
    stream = Stream({"a": ["x"]})
    ahead = ShardReadAhead(Open(1, Lease("a"), TRIM_HORIZON), stream, a_spec(stream), lambda _told: None, lambda: 1)
    ahead.step(0.0)
    held = len(ahead._pieces)  # noqa: SLF001
    ahead.close()
    assert (held, len(ahead._pieces)) == (1, 0)  # noqa: SLF001


@pytest.mark.parametrize("cut", [line_of(BatchKept(12))[:-1], b"x" * (LINE_BYTES + 1)], ids=["cut off", "too long"])
def test_a_line_without_an_end_is_no_message(cut: bytes) -> None:
    """A message that was cut off might be JSON with another meaning."""
    heard = lines(io.BytesIO(line_of(Alive()) + cut))
    assert next(heard) == line_of(Alive())
    with pytest.raises(BadJsonField, match="has no end"):
        next(heard)
