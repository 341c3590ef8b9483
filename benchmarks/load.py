"""Measures a worker under load: with many shards, many leases, large responses, a busy processor, and for a whole day.

    python benchmarks/load.py [PART ...] [--minutes 20] [--write]

Each part runs in a separate process:

shards    one worker with 1,000 shards on a real store: the time until all leases are held, threads, memory, and the
          oldest confirmation
listings  10,000 leases (2,000 on azurite), listed from each store: elapsed time and processor time
answers   30 shards, each read of which returns 10 MiB: the peak memory
busy      100 shards on dynalite, with other processes using every core for nine tenths of the time: memory growth per
          hour, open files and sockets, and missed renewals
day       24 hours of virtual time with 3 workers and 6 leases, stalled requests and paused workers

The oldest confirmation is the longest time that a held lease was without a successful renewal, in any of the samples. A
lease lasts 10 s. Memory is the increase of resident memory over the start of the process. `--write` writes
benchmarks/results/load.md.
"""

import argparse
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from attrs import frozen

from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position, Shard
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.simulator.question import SimulationQuestion, build_config, simulate_on_this_machine
from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string, run_azurite, run_dynalite

RESULTS = Path(__file__).parent / "results" / "load.md"
LEASE_SECONDS = 10.0
MIB = 1 << 20
STORES = {"memory": 10_000, "sqlite": 10_000, "dynalite": 10_000, "azurite": 2_000}
"""The number of leases to list, by store. azurite would take minutes to create more."""

ABOUT = (
    "# Load and size",
    "",
    "Written by `python benchmarks/load.py --write`; do not edit. Each line is the last run of its part, which",
    "`python benchmarks/load.py --help` describes. The machine has two cores and other load; see the averages.",
    "",
)
HEAD = ("| part | what | figures | load average before |", "|---|---|---|---|")

Figures = dict[str, str]


@frozen
class EndlessReader:
    """A reader that returns this number of records of 1 KiB at each read."""

    records: int

    def read(self) -> Batch:
        """Return records that don't share memory, as if they came from a connection."""
        arrival_ns = time.time_ns()
        batch = tuple(Record(os.urandom(1024), str(arrival_ns + number)) for number in range(self.records))
        return Batch(batch, batch[-1].position, 0.0, wait_seconds=1.0)

    def close(self) -> None:
        """Nothing is open."""


@frozen
class Endless:
    """A stream with this number of shards, which always have records."""

    count: int
    records: int = 1
    stream: str = ""

    def shards(self) -> tuple[Shard, ...]:
        """All of them, without hash keys."""
        return tuple(Shard(f"s-{number:04d}") for number in range(self.count))

    def gone(self, _shard: str) -> bool:
        """None ever is."""
        return False

    def latest(self, _lease: Lease) -> Position:
        """Return LATEST. This is not called, because reading starts at the oldest record."""
        return LATEST

    def open(self, _lease: Lease, _start: Position) -> EndlessReader:
        """A reader."""
        return EndlessReader(self.records)

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def store_url(kind: str) -> Iterator[str]:
    """Yield the URL of a new, empty store of this kind."""
    with ExitStack() as opened:
        match kind:
            case "sqlite":
                yield f"sqlite:///{opened.enter_context(TemporaryDirectory())}/leases.db"
            case "dynalite":
                yield f"dynamodb://leases?region=eu-west-1&endpoint={opened.enter_context(run_dynalite()).url}"
            case "azurite":
                service = opened.enter_context(run_azurite())
                os.environ["AZURE_STORAGE_CONNECTION_STRING"] = azurite_connection_string(service)
                yield f"azblob://{AZURITE_ACCOUNT}/leases"
            case _:
                yield "memory://leases"


def memory(name: str = "VmRSS") -> float:
    """Return the resident memory of this process in MiB: the current size, or the peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@frozen
class Sample:
    """The state of a worker at one moment."""

    t: float
    held: int
    oldest: float
    threads: int
    files: int
    mib: float


def run_and_sample(url: str, source: Endless, seconds: float) -> list[Sample]:
    """Run a worker for this number of seconds, and return a sample of its state for each second."""
    store = open_store(url)
    config = Config(lease_seconds=LEASE_SECONDS, initial_position=TRIM_HORIZON)
    worker = Worker(store=store, source=source, me="loaded-1", config=config)
    runner = Runner(worker, lambda _batch: None)
    thread = threading.Thread(target=runner.run)
    began = time.monotonic()
    samples = []
    thread.start()
    try:
        while (elapsed := time.monotonic() - began) < seconds:
            clock, held = worker.clock(), worker.holdings
            oldest = max((clock - holding.confirmed_at for holding in held), default=0.0)
            files = sum(1 for _ in Path("/proc/self/fd").iterdir())
            samples.append(Sample(elapsed, len(held), oldest, threading.active_count(), files, memory()))
            time.sleep(1.0)
    finally:
        runner.stop()
        thread.join()
        store.close()
    return samples


def shards(kind: str, count: int = 1000, seconds: float = 240.0) -> Figures:
    """Run one worker with many shards, and return its figures."""
    memory_before = memory()
    with store_url(kind) as url:
        samples = run_and_sample(url, Endless(count), seconds)
    all_held_at = next((sample.t for sample in samples if sample.held == count), None)
    samples_after = [sample for sample in samples if all_held_at is not None and sample.t > all_held_at]
    return {
        "all held after": f"{all_held_at:.0f} s"
        if all_held_at is not None
        else f"NEVER: {samples[-1].held} after {seconds:g} s",
        "looks that missed one afterwards": str(sum(sample.held < count for sample in samples_after)),
        "threads": str(max(sample.threads for sample in samples)),
        "memory": f"{memory('VmHWM') - memory_before:.0f} MiB",
        "oldest confirmation": f"{max(sample.oldest for sample in samples_after or samples):.1f} s",
    }


def listings(kind: str, count: int) -> Figures:
    """List this number of leases five times, and return the median times."""
    with store_url(kind) as url:
        store = open_store(url)
        with ThreadPoolExecutor(1 if kind == "sqlite" else 16) as pool:
            list(pool.map(lambda number: store.write(CreateLease(Lease(f"shardId-{number:012d}"))), range(count)))
        durations = []
        for _ in range(5):
            wall_start, processor_start = time.perf_counter(), time.process_time()
            assert len(store.list().leases) == count
            durations.append((time.perf_counter() - wall_start, time.process_time() - processor_start))
        store.close()
    wall, processor = sorted(durations)[2]
    return {"leases": str(count), "seconds": f"{wall:.2f}", "of the processor": f"{processor:.2f}"}


def answers(count: int = 30, seconds: float = 30.0) -> Figures:
    """Run a worker whose reads all return 10 MiB at the same time, repeatedly."""
    memory_before = memory()
    samples = run_and_sample("memory://leases", Endless(count, 10 * 1024), seconds)
    return {
        "shards": str(count),
        "memory, most": f"{memory('VmHWM') - memory_before:.0f} MiB",
        "oldest confirmation": f"{max(sample.oldest for sample in samples):.1f} s",
    }


def keep_core_busy(share: float) -> None:
    """Keep a core busy for this share of the time."""
    while True:
        until = time.perf_counter() + share / 10
        while time.perf_counter() < until:
            pass
        time.sleep((1 - share) / 10)


def busy(minutes: float, count: int = 100) -> Figures:
    """Run a worker while other processes keep every core busy."""
    burners = [
        multiprocessing.Process(target=keep_core_busy, args=(0.9,), daemon=True) for _ in range(os.cpu_count() or 1)
    ]
    for burner in burners:
        burner.start()
    try:
        with store_url("dynalite") as url:
            samples = run_and_sample(url, Endless(count), 60 * minutes)
    finally:
        for burner in burners:
            burner.kill()
    later_samples = samples[len(samples) // 3 :]
    return {
        "minutes": f"{minutes:g}",
        "memory": f"{later_samples[-1].mib:.0f} MiB",
        "memory slope": f"{memory_growth(later_samples):+.1f} MiB an hour",
        "open files and sockets": f"{later_samples[0].files} to {later_samples[-1].files}",
        "oldest confirmation": f"{max(sample.oldest for sample in later_samples):.1f} s",
        "looks that found a missed renewal": str(sum(sample.oldest > LEASE_SECONDS for sample in later_samples)),
        "looks with less than all leases": str(sum(sample.held < count for sample in later_samples)),
    }


def memory_growth(samples: list[Sample]) -> float:
    """Return the growth of memory in MiB per hour, by least squares."""
    t, mib = [sample.t for sample in samples], [sample.mib for sample in samples]
    mean_t, mean = sum(t) / len(t), sum(mib) / len(mib)
    spread = sum((sample_time - mean_t) ** 2 for sample_time in t)
    return 3600 * sum((x - mean_t) * (y - mean) for x, y in zip(t, mib, strict=True)) / spread


def day(hours: float) -> Figures:
    """Simulate a small balanced fleet for this number of hours."""
    question = SimulationQuestion(6, (3,), "minimal", kind="steady", pace="own", pauses=2.0, checkpoints=60.0)
    cycles = hours * 3600 / build_config(question).cycle_seconds
    question = SimulationQuestion(
        6, (3,), "minimal", kind="steady", pace="own", pauses=2.0, checkpoints=60.0, cycles=cycles
    )
    began = time.process_time()
    ((_, outcome),) = simulate_on_this_machine(question, [1], 1)
    return {
        "virtual hours": f"{hours:g}",
        "seconds of the processor": f"{time.process_time() - began:.0f}",
        **{name: f"{outcome[name]}" for name in ("moves", "claims", "failed_writes", "unowned_lease_cycles_max")},
        "memory": f"{memory('VmHWM'):.0f} MiB",
    }


def parts(minutes: float, hours: float) -> dict[str, dict[str, tuple[Callable[..., Figures], tuple[object, ...]]]]:
    """Return the measurements, by part and by name of the line."""
    return {
        "shards": {f"1,000 shards on {kind}": (shards, (kind,)) for kind in ("sqlite", "dynalite")},
        "listings": {kind: (listings, (kind, count)) for kind, count in STORES.items()},
        "answers": {"10 MiB answers": (answers, ())},
        "busy": {"100 shards on dynalite, processor at 90 %": (busy, (minutes,))},
        "day": {"steady fleet": (day, (hours,))},
    }


def run_in_process(work: Callable[..., Figures], arguments: tuple[object, ...]) -> Figures:
    """Run a measurement in a separate process, and return its figures."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=logging.disable) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    """Measure, print the figures, and write the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts, or names of single lines [all]")
    parser.add_argument("--minutes", type=float, default=20.0, help="of a busy processor")
    parser.add_argument("--hours", type=float, default=24.0, help="of virtual time")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    lines = []
    for part, measurements in parts(options.minutes, options.hours).items():
        for name, (work, arguments) in measurements.items():
            if {part, name} & set(options.parts) or not options.parts:
                load = os.getloadavg()[0]
                figures = ", ".join(f"{label} {figure}" for label, figure in run_in_process(work, arguments).items())
                lines.append(f"| {part} | {name} | {figures} | {load:.1f} |")
                print(lines[-1], flush=True)
    if options.write:
        write(lines)


def write(lines: list[str]) -> None:
    """Write these lines to the page. They replace the lines of the same parts and names."""
    old_lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = {row.split("|")[2]: row for row in [*old_lines, *lines] if row.startswith("| ")}
    rows.pop(HEAD[0].split("|")[2], None)
    RESULTS.write_text("\n".join([*ABOUT, *HEAD, *rows.values(), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
