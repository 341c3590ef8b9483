"""Lines written into a file that refuses some for a while: none is torn, and none of those that are owed is missing."""

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

from leasehold.adapters.consumer.events import EventLines, WholeLines
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import Lease

LINES = st.lists(st.binary(max_size=6).map(lambda data: data.replace(b"\n", b"") + b"\n"), max_size=5)


@define
class Raw:
    """A file that takes so many bytes of each write; none is a refusal."""

    takes: list[int]
    why: int = errno.ENOSPC
    written: bytearray = field(factory=bytearray)

    def write(self, data: bytes) -> int:
        """Take some of it, or refuse it."""
        most = self.takes.pop(0) if self.takes else len(data)
        if not most:
            raise OSError(self.why, "refused")
        self.written += data[:most]
        return min(most, len(data))


@define
class Out:
    """What `sys.stdout` is over such a file."""

    raw: Raw

    @property
    def buffer(self) -> "Out":
        return self


def over(raw: Raw) -> TextIO:
    """The text file over it."""
    return cast("TextIO", Out(raw))


@given(st.lists(LINES, max_size=6), st.lists(st.integers(0, 4), max_size=40))
def test_a_refused_line_that_is_written_again_is_there_once(batches: list[list[bytes]], takes: list[int]) -> None:
    """A disk that was full for a moment would leave half a line, or the same line twice, in what programs read."""
    raw = Raw(takes)
    lines = WholeLines(over(raw))
    for batch in batches:
        data = b"".join(batch)
        while (refused := lines.write(data)) is not None:
            data = refused.left
    assert bytes(raw.written) == b"".join(line for batch in batches for line in batch)


@given(st.lists(LINES, max_size=6), st.lists(st.integers(0, 4), max_size=40))
def test_a_batch_that_comes_again_doubles_whole_lines_alone(batches: list[list[bytes]], takes: list[int]) -> None:
    """Likewise where the batch has failed and comes again from its beginning."""
    raw = Raw(takes)
    lines = WholeLines(over(raw))
    for batch in batches:
        while lines.write(b"".join(batch)) is not None:
            pass
    owed = {line for batch in batches for line in batch}
    assert set(re.findall(rb"[^\n]*\n", raw.written)) == owed


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_refusal_of_a_full_disk_is_told_and_not_raised(unbuffered: str) -> None:
    """In a container, where Python's output is unbuffered as a rule, a full disk would end all processes."""
    code = "import sys; from leasehold.adapters.consumer.events import WholeLines as L; L(sys.stdout).write(b'x').left"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            (sys.executable, "-c", code),
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_event_of_a_shard_while_the_disk_is_full_is_told_afterwards(holding: Holding) -> None:
    """Who reads the events would take a shard for read that was left, as nobody tells of it again."""
    raw = Raw([5, 0, 0])
    lines = EventLines("a-1", over(raw), wall=lambda: 1.5)
    for happening in ("initialize", "lease-lost", "initialize"):
        lines.happened(happening, holding)
    told = [json.loads(line)["event"] for line in io.BytesIO(bytes(raw.written))]
    assert told == ["initialize", "lease-lost", "initialize"]


def test_a_pipe_that_nobody_reads_is_no_full_disk() -> None:
    """A tool at the end of a pipe would try for ever, or a full disk end it."""
    lines = WholeLines(over(Raw([3, 0], errno.EPIPE)))
    with pytest.raises(BrokenPipeError):
        lines.write(b"a line\n")


@pytest.fixture
def holding() -> Holding:
    """Of a lease that nothing is asked but its names."""
    return cast("Holding", Named())


@define
class Named:
    """A holding's lease."""

    lease: Lease = field(factory=lambda: Lease("s-0"))
    stream: str = ""
