"""How rows that the runner has read reach Spark's tasks: by files on one host, or inside the tasks themselves."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen
from pyspark.sql.datasource import InputPartition


@frozen
class SpooledRows(InputPartition):
    """Rows in a file on the driver's host."""

    path: str


@frozen
class EmbeddedRows(InputPartition):
    """Rows that travel with their task."""

    data: bytes

    def __repr__(self) -> str:
        return f"EmbeddedRows({len(self.data)} bytes)"


Rows = SpooledRows | EmbeddedRows


class Transport:
    """Makes tasks of batches, and lets them go once Spark is done with them.

    folder  where a folder for the files is made; "" for the system's own place; None: rows are embedded
    """

    def __init__(self, folder: str | None) -> None:
        self._spool = None if folder is None else Path(tempfile.mkdtemp(prefix="leasehold-spool-", dir=folder or None))

    def partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch]]) -> list[Rows]:
        """One for each task of this batch; the same each time."""
        return [self._partition(f"{number}-{place}.arrow", batches) for place, batches in enumerate(tasks)]

    def discard(self, number: int) -> None:
        """The files of this batch are read no more."""
        for path in self._spool.glob(f"{number}-*.arrow") if self._spool else ():
            path.unlink()

    def close(self) -> None:
        """Remove all files."""
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)

    def _partition(self, name: str, batches: Sequence[pa.RecordBatch]) -> Rows:
        if self._spool is None:
            sink = pa.BufferOutputStream()
            _write(sink, batches)
            return EmbeddedRows(sink.getvalue().to_pybytes())
        path = self._spool / name
        with pa.OSFile(str(path), "wb") as file:
            _write(file, batches)
        return SpooledRows(str(path))


def _write(sink: pa.NativeFile, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read(rows: Rows) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Raises RuntimeError if its file is on another host."""
    if isinstance(rows, EmbeddedRows):
        yield from pa.ipc.open_stream(rows.data)
        return
    try:
        source = pa.memory_map(rows.path)
    except FileNotFoundError:
        raise RuntimeError(
            f"{rows.path} is not on this host: set lease.transport to embedded, or lease.spoolFolder to a shared folder"
        ) from None
    with source:
        yield from pa.ipc.open_stream(source)
