"""Lines are written completely, even if a file rejects some writes for a while."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from reader_harness import ReaderHarness

from leasehold.adapters.consumer.events import EventLines, LineWriter
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Lease, Position
from leasehold_lab.simulator.world.world import create_records

LINES = st.lists(st.binary(max_size=6).map(lambda data: data.replace(b"\n", b"") + b"\n"), max_size=5)


@define
class Raw:
    """A file that accepts only some bytes of each write. `takes` contains these numbers, and 0 rejects a write."""

    takes: list[int]
    why: int = errno.ENOSPC
    written: bytearray = field(factory=bytearray)

    def write(self, data: bytes) -> int:
        """Write a part of the data, or reject the write."""
        accepted_bytes = self.takes.pop(0) if self.takes else len(data)
        if not accepted_bytes:
            raise OSError(self.why, "refused")
        self.written += data[:accepted_bytes]
        return min(accepted_bytes, len(data))


@define
class Out:
    """A replacement for `sys.stdout` that writes to a `Raw` file."""

    raw: Raw

    @property
    def buffer(self) -> "Out":
        return self


def text_file_over(raw_file: Raw) -> TextIO:
    """Return a text file that writes to this raw file."""
    return cast("TextIO", Out(raw_file))


@given(st.lists(LINES, max_size=6), st.lists(st.integers(0, 4), max_size=40))
def test_rejected_line_that_is_written_again_appears_once(batches: list[list[bytes]], takes: list[int]) -> None:
    raw_file = Raw(takes)
    whole_lines = LineWriter(text_file_over(raw_file))
    for batch in batches:
        data = b"".join(batch)
        while (partial_write := whole_lines.write(data)) is not None:
            data = partial_write.unwritten
    assert bytes(raw_file.written) == b"".join(line for batch in batches for line in batch)


@given(st.lists(LINES, max_size=6), st.lists(st.integers(0, 4), max_size=40))
def test_repeated_batch_duplicates_only_whole_lines(batches: list[list[bytes]], takes: list[int]) -> None:
    raw_file = Raw(takes)
    whole_lines = LineWriter(text_file_over(raw_file))
    for batch in batches:
        while whole_lines.write(b"".join(batch)) is not None:
            pass
    expected_lines = {line for batch in batches for line in batch}
    assert set(re.findall(rb"[^\n]*\n", raw_file.written)) == expected_lines


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_is_logged_and_not_raised(unbuffered: str) -> None:
    """The error is returned to the caller, so that the process can continue."""
    events = "leasehold.adapters.consumer.events"
    code = f"import sys; from {events} import LineWriter as L; L(sys.stdout).write(b'x').unwritten"
    with Path("/dev/full").open("wb") as full_device:
        result = subprocess.run(
            (sys.executable, "-c", code),
            stdout=full_device,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, b"")


def test_shard_event_during_a_full_disk_is_written_afterwards(holding: Holding) -> None:
    raw = Raw([5, 0, 0])
    lines = EventLines("a-1", text_file_over(raw), wall=lambda: 1.5)
    for happening in ("initialize", "lease-lost", "initialize"):
        lines.write_shard_event(happening, holding)
    events = [json.loads(line)["event"] for line in io.BytesIO(bytes(raw.written))]
    assert events == ["initialize", "lease-lost", "initialize"]


def test_batch_repeated_after_a_full_disk_is_written_once() -> None:
    raw = Raw([0])
    lines = EventLines("a-1", text_file_over(raw), wall=lambda: 1.5)
    batch = Delivery(create_records(2), Position("101"), None, ReaderHarness().holding)
    with pytest.raises(OSError, match="refused"):
        lines.handle(batch)
    lines.handle(batch)
    numbers = [json.loads(line)["sequence_number"] for line in io.BytesIO(bytes(raw.written))]
    assert numbers == ["100", "101"]


def test_shard_event_is_kept_although_a_batch_after_it_failed(holding: Holding) -> None:
    """A batch that could not be written is dispatched again, but an event occurs only once."""
    raw = Raw([0, 0])
    lines = EventLines("a-1", text_file_over(raw), wall=lambda: 1.5)
    batch = Delivery(create_records(1), Position("100"), None, ReaderHarness().holding)
    lines.write_shard_event("initialize", holding)
    with pytest.raises(OSError, match="refused"):
        lines.handle(batch)
    lines.handle(batch)
    events = [json.loads(line)["event"] for line in io.BytesIO(bytes(raw.written))]
    assert events == ["initialize", "record"]


def test_closed_pipe_ends_every_later_call_and_leaves_no_descriptor(holding: Holding) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with os.fdopen(writing_end, "w") as out:
        lines, open_descriptors = EventLines("a-1", out, wall=lambda: 1.5), len([*Path("/proc/self/fd").iterdir()])
        for _ in range(2):
            with pytest.raises(SystemExit):
                lines.write_shard_event("stopped", holding)
        out.write("Python writes what is left when it exits.")
    assert len([*Path("/proc/self/fd").iterdir()]) == open_descriptors - 1


def test_closed_pipe_is_not_a_full_disk() -> None:
    """A write to a full disk is retried, but a closed pipe ends the command."""
    lines = LineWriter(text_file_over(Raw([3, 0], errno.EPIPE)))
    with pytest.raises(BrokenPipeError):
        lines.write(b"a line\n")


@pytest.fixture
def holding() -> Holding:
    """Returns a holding for tests that use only the names of its lease."""
    return cast("Holding", Named())


@define
class Named:
    """A stand-in for a holding, which has only a lease and a stream."""

    lease: Lease = field(factory=lambda: Lease("s-0"))
    stream: str = ""
