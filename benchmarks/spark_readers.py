"""How far a Spark query's work is shared by readers: processor time of the planner, and of each reader, for a row.

    python benchmarks/spark_readers.py

The server and the query are those of `spark_runner`, with rows of 1 KB. What counts is processor time: how many rows a
second it is enough for depends on processors alone, and not on what else runs here. A query carries what the busiest of
its processes can, be it the planner or a reader, where each has a processor. The packages are as found, not
compiled. It ends with 1 where two readers carry less than 1.8 times what one does.
"""

import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from spark_runner import LOADS, Spent, carried, serve

from leasehold.adapters.demo.child import ENVIRONMENT
from leasehold.adapters.spark.readers.far_rows import FarReader
from leasehold.adapters.spark.readers.messages import ShardReport

Take = Callable[[FarReader, ShardReport], None]

BAR = 1.8
ROWS, SETTLE_SECONDS = 150_000, 5.0
WAYS = (0, 1, 2)


@frozen
class Shared:
    """What a number of rows took.

    planner  processor time of the process that plans, and time by the clock
    readers  processor seconds of each reader
    read     rows that they have read meanwhile, ahead of what was planned included
    """

    planner: Spent
    readers: tuple[float, ...]
    read: int

    @property
    def reading(self) -> list[float]:
        """Microseconds of each reader for a row of all that were read."""
        return [spent / max(1, self.read) * 1e6 for spent in self.readers]

    @property
    def busiest(self) -> float:
        """Microseconds of processor time for a row, of the process that has most to do."""
        return max(self.planner.micros, *self.reading, 0.0)


def shared(work: Callable[[], int]) -> Shared:
    """Measure this process and its readers, once those that come later have their part of the shards."""
    settled = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < settled:
        work()
    reported = list[int]()
    before, spent, began, rows = spent_by_readers(), time.process_time(), time.monotonic(), 0
    FarReader.report = counted(FarReader.report, reported)  # type: ignore[assignment, method-assign]  # only here
    while rows < ROWS:
        rows += work()
    planner = Spent(rows, time.process_time() - spent, time.monotonic() - began)
    after = spent_by_readers()
    return Shared(planner, tuple(spent - before.get(reader, 0.0) for reader, spent in after.items()), sum(reported))


def counted(report: Take, reported: list[int]) -> Take:
    """The same, noting how many rows are reported."""

    def take(self: FarReader, what: ShardReport) -> None:
        reported.append(sum(piece.rows for piece in what.pieces))
        report(self, what)

    return take


def spent_by_readers() -> dict[int, float]:
    """Processor seconds of each so far."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if (
                int(fields[1]) == os.getpid()
                and b"leasehold.adapters.spark.readers" in (folder / "cmdline").read_bytes()
            ):
                found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # it has ended
    return found


def main() -> int:
    """Print a table; 1 where the bar is not met."""
    os.environ.update(ENVIRONMENT)
    logging.getLogger("leasehold.spark").setLevel(logging.WARNING)
    load = LOADS[0]
    ports: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(load, ports), daemon=True)
    server.start()
    endpoint = f"http://127.0.0.1:{ports.get()}"
    print(f"{load.name}, load {os.getloadavg()[0]:.1f}; µs of processor time for a row")
    print(f"{'':12}{'planner':>9}{'each reader':>20}{'one processor each carries':>30}{'by the clock, here':>22}")
    busiest = {}
    with tempfile.TemporaryDirectory() as folder:
        for readers in WAYS:
            found = carried(endpoint, Path(folder), "fetch", shared, readers)
            busiest[readers] = found.busiest
            each = ", ".join(f"{micros:.1f}" for micros in found.reading)
            rate = f"{1e6 / found.busiest:,.0f} rows/s"
            clock = f"{found.planner.rows / found.planner.seconds:,.0f} rows/s"
            print(f"{readers} readers   {found.planner.micros:9.1f}{each:>20}{rate:>30}{clock:>22}")
    server.terminate()
    gain = busiest[1] / busiest[2]
    print(f"two readers / one: {gain:.2f}, bar {BAR:g}: {'pass' if gain >= BAR else 'FAIL'}")
    return 0 if gain >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
