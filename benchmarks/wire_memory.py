"""Measures the memory that is needed to read responses of 10 MiB, relative to their size and to boto3's client.

    python benchmarks/wire_memory.py

The server is that of `wire_speed`. Each reader runs in a separate process, whose result is the peak of its resident
memory, minus the peak with responses of one row. The memory of libraries, a client and a worker is therefore not
counted. The handler reads the data of each record, and keeps none of them. The size of a response is that of its
payload. In JSON, a response is about a third larger. The codec is compiled as in a wheel. The exit status is 1 if a
limit is not met.
"""

import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attrs import evolve, frozen
from compiled import as_installed
from wire_server import Load, rows_of, served
from wire_speed import codec_compiled, measure_boto3, measure_worker, run_in_process

from leasehold_lab.demo.child import ENVIRONMENT

MOST = 4.0
"""The limit, as a multiple of the payload of a response."""

LOADS = (
    Load("1 KB rows", 10_000, 1040),
    Load("50 KB aggregates of 100 B", 190, 55_000, 490),
)


SMALL = Load("one row", 1, 100)
SECONDS = 3.0


@frozen
class Reading:
    """A reader to measure. If `judged`, the limit applies to it."""

    name: str
    work: Callable[[str, Load, float], float]
    judged: bool = False


READINGS = (
    Reading("boto3", measure_boto3),
    Reading("worker", partial(measure_worker, options={}), judged=True),
    Reading("worker, wire=json", partial(measure_worker, options={"wire": "json"})),
)


def peak(work: Callable[[str, Load, float], float], url: str, load: Load) -> int:
    """Run a reader in this process, and return the peak of its resident memory in bytes."""
    work(url, load, SECONDS)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure_and_print(load: Load) -> bool:
    """Measure all readers, print a table, and return whether the limit is met."""
    payload = load.records * len(rows_of(evolve(load, records=1))[0]["Data"])
    print(
        f"\n{load.name}, {load.records} in an answer of {payload / 2**20:.1f} MiB\n| | MiB | times the answer | bar |"
    )
    print("|---|---|---|---|")
    all_good = True
    with served(SMALL) as small, served(load) as url:
        for reader in READINGS:
            bytes_used = run_in_process(peak, reader.work, url, load) - run_in_process(peak, reader.work, small, SMALL)
            meets_limit = bytes_used <= MOST * payload
            all_good = all_good and (meets_limit or not reader.judged)
            verdict = f"{MOST:g} {'pass' if meets_limit else 'FAIL'}" if reader.judged else ""
            print(f"| {reader.name} | {bytes_used / 2**20:.0f} | {bytes_used / payload:.1f} x | {verdict} |")
    return all_good


def main() -> None:
    """Measure. The exit status is 1 if the limit is not met."""
    os.environ.update(ENVIRONMENT)
    with as_installed() as installed:
        sys.path.insert(0, str(installed))  # new processes inherit this path
        codec = "compiled" if run_in_process(codec_compiled) else "NOT compiled"
        print(f"Python {sys.version.split()[0]}, {platform.libc_ver()[0]}, codec {codec}")
        verdicts = [measure_and_print(load) for load in LOADS]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
