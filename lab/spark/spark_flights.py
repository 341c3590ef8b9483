"""Shares flights between two Spark applications and a plain Python worker, with faults during the run.

    python lab/spark/spark_flights.py --help

All three write Parquet files under one folder. During the run, the Java process of one application is killed, a shard
is split, and the query of the other application is stopped.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
from attrs import asdict, define, evolve, field, frozen
from flights import Row, flights, to_stderr
from spark_application import Application
from spark_ground import MARK, SHARDS, Feed, Ground, a_ground, options
from standins.flight_rows import ROWS

from leasehold_lab.demo.child import Child

IDENTITY = ["shardId", "sequenceNumber", "subSequenceNumber"]
LEASE_SECONDS = 6.0
SETTLE_SECONDS, ARRIVE_SECONDS, LOOK_SECONDS = 600.0, 900.0, 0.25
LANDING = str(Path(__file__).with_name("landing.py"))


def rows(count: int) -> Iterator[Row]:
    """Return the first flights, each as one line of CSV."""
    for number, row in enumerate(flights(count)):
        _, *values = json.loads(row.data)
        line = f"{number},{values[9]},{values[11]},{values[15]},{values[18]}"
        yield evolve(row, data=line.encode())


@frozen
class Found:
    """The result of a run.

    Attributes:
        sent: The number of rows that were sent.
        landed: The number of different rows in the files.
        lost: The number of rows that were sent and are in no file.
        strangers: The number of rows in the files that were never sent.
        duplicates: The number of repeated rows in the files.
        explained: The number of duplicates in shards that the killed or the stopped application held.
        by: The number of rows that each member wrote.
        shares: The number of leases of each member after each event.
        outlived: How many seconds the descendants of the killed Java process lived on, by program.
        released: The seconds from the kill until the application owned no leases any more.
        at_tip: The number of unfinished leases at the last record of their shard, and the number of all unfinished
            leases.
    """

    sent: int
    landed: int
    lost: int
    strangers: int
    duplicates: int
    explained: int
    by: Mapping[str, int]
    shares: Mapping[str, Mapping[str, int]]
    outlived: Mapping[str, float]
    released: float
    at_tip: tuple[int, int]


@define
class Run:
    """One run of the story."""

    ground: Ground
    folder: Path
    feed: Feed
    told: Callable[[str], None]
    members: dict[str, Child] = field(factory=dict)
    shares: dict[str, Mapping[str, int]] = field(factory=dict)
    held: frozenset[str] = frozenset()
    outlived: Mapping[str, float] = field(factory=dict)
    released: float = 0.0

    def application(self, name: str) -> None:
        """Start an application. If an application with this name ran before, it continues where that one stopped."""
        named = (*self.ground.options, f"lease.store={self.ground.store}", f"lease.workerId={name}")
        sets = [f"--set={each}" for each in (*named, f"lease.durationMs={LEASE_SECONDS * 1000:g}")]
        words = (self.ground.format, *sets, "--folder", str(self.folder), "--name", name)
        log = self.folder / f"{name}.log"
        if log.exists():
            log.rename(log.with_suffix(f".{time.monotonic():.0f}.log"))
        self.members[name] = Application(name, words, self.folder)

    def _again(self, name: str, starved: Application) -> None:
        """Start the application again, as its operator would."""
        self.told(f"{name} could not start Python in time, starting it again")
        starved.kill()
        self.application(name)

    def plain(self, name: str) -> None:
        words = (LANDING, self.ground.url, self.ground.store, str(self.folder / "rows" / name), name)
        self.members[name] = Child(name, (*words, str(LEASE_SECONDS)), self.folder)

    def kill(self, name: str) -> None:
        """Kill an application's Java with SIGKILL."""
        application = self.members.pop(name)
        assert isinstance(application, Application)
        self._note_held(name)
        began = time.monotonic()
        self.outlived = application.kill_java()
        self.until(lambda: name not in self.counts(), "the killed application's leases are free", LEASE_SECONDS * 3)
        self.released = round(time.monotonic() - began, 1)

    def stop(self, name: str) -> None:
        application = self.members.pop(name)
        assert isinstance(application, Application)
        self._note_held(name)
        assert application.stop() == 0, application.said
        application.kill()

    def _note_held(self, name: str) -> None:
        """Record the shards that the application holds.

        If the last batch is in the sink but not committed, other members repeat the rows of these shards.
        """
        self.held |= {lease.shard for lease in self.leases() if _group(lease.owner) == name}

    # What is seen

    def leases(self) -> list[Any]:
        return [lease for lease in self.ground.table.list().leases if not lease.ended]

    def counts(self) -> Counter[str]:
        """Return how many leases each member holds."""
        return Counter(_group(lease.owner) for lease in self.leases())

    def balanced(self) -> bool:
        """Return whether the members hold all leases, each under a single owner name, with balanced loads.

        A load is the sum of the weights of the member's leases, because the rules balance measured throughputs. Loads
            may
        differ by the weight of one lease.
        """
        leases = self.leases()
        known = [lease.weight for lease in leases if lease.weight]
        usual = sum(known) / len(known) if known else 1.0
        loads = dict.fromkeys(self.members, 0.0)
        for lease in leases:
            loads[_group(lease.owner)] = loads.get(_group(lease.owner), 0.0) + (lease.weight or usual)
        full = len(leases) >= SHARDS and len({lease.owner for lease in leases}) == len(self.members) == len(loads)
        return full and max(loads.values()) - min(loads.values()) <= max(known, default=1.0)

    def settle(self, after: str) -> None:
        """Wait for balance, and record it."""
        self.until(self.balanced, f"balance after {after}", SETTLE_SECONDS)
        self.shares[after] = dict(self.counts())

    def until(self, holds: Callable[[], object], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        next_report = 0.0
        while not holds():
            now = time.monotonic()
            for name, member in list(self.members.items()):
                if isinstance(member, Application) and member.starved:
                    self._again(name, member)
                    continue
                assert member.running, f"{name} ended by itself; its last words:\n{member.said}"
            assert now < deadline, f"not within {seconds:g} s: {what}; {dict(self.counts())}"
            if now > next_report:
                next_report = now + 10
                self.told(f"sent {self.feed.sent:7,}  {dict(self.counts())}  waiting: {what}")
            time.sleep(LOOK_SECONDS)

    def end(self) -> None:
        for member in self.members.values():
            member.kill()


def _group(owner: str | None) -> str:
    return "" if owner is None else owner.rpartition("-")[0]


def play(run: Run, count: int, fed: Future[None]) -> tuple[int, int]:
    """Run the scenario. Return the number of leases at the last record of their shard, and the number of all leases."""
    deeds: tuple[tuple[float, str, Callable[[], object]], ...] = (
        (0.0, "one joined", partial(run.application, "one")),
        (0.05, "two joined", partial(run.application, "two")),
        (0.1, "plain joined", partial(run.plain, "plain")),
        (0.3, "one killed", partial(run.kill, "one")),
        (0.5, "one again", partial(run.application, "one")),
        (0.6, "split", run.ground.split),
        (0.8, "two stopped", partial(run.stop, "two")),
    )
    for place, (share, what, deed) in enumerate(deeds):
        following = deeds[place + 1][0] if place + 1 < len(deeds) else 1.0
        run.feed.limit = int(following * count)
        # A little more than the share, so that rows are on their way when the fault happens.
        run.until(lambda: run.feed.sent >= int((share + 0.02) * count), "rows to be sent", ARRIVE_SECONDS)  # noqa: B023
        run.told(what)
        deed()
        run.settle(what)
    run.until(fed.done, "the stream to have all rows", ARRIVE_SECONDS)
    fed.result()
    return _finish(run)


def _finish(run: Run) -> tuple[int, int]:
    marks = run.ground.put(MARK)

    def at_tip() -> int:
        # A shard that was split and is not read to its end has no mark, so its lease never counts as being at the tip.
        marked = [lease for lease in run.leases() if lease.key in marks and lease.checkpoint.numbered]
        return sum(int(lease.checkpoint.sequence) >= marks[lease.key] for lease in marked)

    run.until(lambda: at_tip() == len(run.leases()), "every lease to stand at the last record", ARRIVE_SECONDS)
    return at_tip(), len(run.leases())


def verdict(run: Run, sent: Sequence[Row], at_tip: tuple[int, int]) -> Found:
    landed = pd.concat([_landed(run.folder / "rows" / name, name) for name in ("one", "two", "plain")])
    flown = landed[landed["data"] != MARK]
    once = flown.drop_duplicates(IDENTITY)
    again = flown[flown.duplicated(IDENTITY)]
    sent_data, landed_data = {row.data for row in sent}, set(once["data"])
    return Found(
        sent=len(sent),
        landed=len(once),
        lost=len(sent_data - landed_data),
        strangers=len(landed_data - sent_data) + len(once) - len(landed_data),
        duplicates=len(again),
        explained=int(again["shardId"].isin(run.held).sum()),
        by=dict(Counter(flown["member"])),
        shares=run.shares,
        outlived=run.outlived,
        released=run.released,
        at_tip=at_tip,
    )


def _files(folder: Path) -> list[Path]:
    """Return the files that the log of Spark's file sink lists, or all files if there is no log."""
    logs = list((folder / "_spark_metadata").glob("[0-9]*"))
    if not logs:
        return sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith("."))
    lines = {line for log in logs for line in log.read_text().splitlines()[1:]}
    return sorted(Path(json.loads(line)["path"].removeprefix("file://")) for line in lines)


def _landed(folder: Path, member: str) -> pd.DataFrame:
    """Return the rows of this member, with the columns of Kinesis."""
    found = pd.concat([pq.ParquetFile(path).read().to_pandas() for path in _files(folder)])
    found = found.rename(columns={"partition": "shardId", "body": "data"})
    if "subSequenceNumber" not in found:  # events of a hub have no parts
        found["subSequenceNumber"] = 0
    found["sequenceNumber"] = found["sequenceNumber"].astype(str)
    return found[[*IDENTITY, "data"]].assign(member=member)


def tried(ground: Ground, sent: Sequence[Row], folder: Path, *, rate: int, told: Callable[[str], None]) -> Found:
    """Run the scenario with this stream and lease table, keeping files in this folder, and return the result."""
    with ExitStack() as stack:
        for name in ("one", "two", "plain"):
            (folder / "rows" / name).mkdir(parents=True)
        run = Run(ground, folder, ground.feed(sent, rate), told)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(run.feed.end)
        stack.callback(run.end)
        fed = pool.submit(run.feed)
        return verdict(run, sent, play(run, len(sent), fed))


def printed(found: Found) -> str:
    return json.dumps(asdict(found), indent=2) + "\n"


def main() -> int:
    parser = options("Share flights between Spark and plain Python; print what came of it.")
    parser.add_argument("--rows", type=int, default=ROWS, help="how many (%(default)s)")
    parser.add_argument("--rate", type=int, default=3_000, help="rows a second at most (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write, and to leave it (a folder that goes again)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        ground = stack.enter_context(a_ground(arguments))
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-spark-")))
        result = tried(ground, list(rows(arguments.rows)), folder, rate=arguments.rate, told=to_stderr)
    sys.stdout.write(printed(result))
    return 0 if (result.lost, result.strangers) == (0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
