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
from flights import Row, print_to_stderr, read_flights
from spark_application import Application
from spark_ground import MARK, SHARDS, Feed, Ground, create_parser, open_environment
from standins.flight_rows import ROWS

from leasehold_lab.demo.child import Child

IDENTITY = ["shardId", "sequenceNumber", "subSequenceNumber"]
LEASE_SECONDS = 6.0
SETTLE_SECONDS, ARRIVE_SECONDS, LOOK_SECONDS = 600.0, 900.0, 0.25
LANDING_SCRIPT = str(Path(__file__).with_name("landing.py"))


def read_rows(count: int) -> Iterator[Row]:
    """Return the first flights, each as one line of CSV."""
    for number, row in enumerate(read_flights(count)):
        _, *values = json.loads(row.data)
        line = f"{number},{values[9]},{values[11]},{values[15]},{values[18]}"
        yield evolve(row, data=line.encode())


@frozen
class FlightsResult:
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
        outlived: For how many seconds descendants of the killed Java process kept running, by program.
        released: The seconds from the kill until the application owned no leases any more.
        at_tip: The number of unfinished leases that have reached the last record of their shard, and the number of all
            unfinished leases.
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
    """The members and the state of one run."""

    ground: Ground
    folder: Path
    feed: Feed
    report: Callable[[str], None]
    members: dict[str, Child] = field(factory=dict)
    shares: dict[str, Mapping[str, int]] = field(factory=dict)
    held: frozenset[str] = frozenset()
    outlived: Mapping[str, float] = field(factory=dict)
    released: float = 0.0

    def start_application(self, name: str) -> None:
        """Start an application. If an application with this name ran before, it continues where that one stopped."""
        lease_options = (*self.ground.options, f"lease.store={self.ground.store}", f"lease.workerId={name}")
        set_options = [f"--set={option}" for option in (*lease_options, f"lease.durationMs={LEASE_SECONDS * 1000:g}")]
        arguments = (self.ground.format, *set_options, "--folder", str(self.folder), "--name", name)
        log_file = self.folder / f"{name}.log"
        if log_file.exists():
            log_file.rename(log_file.with_suffix(f".{time.monotonic():.0f}.log"))
        self.members[name] = Application(name, arguments, self.folder)

    def _restart(self, name: str, application: Application) -> None:
        """Start the application again, as its operator would."""
        self.report(f"{name} could not start Python in time, starting it again")
        application.kill()
        self.start_application(name)

    def start_plain_worker(self, name: str) -> None:
        arguments = (LANDING_SCRIPT, self.ground.url, self.ground.store, str(self.folder / "rows" / name), name)
        self.members[name] = Child(name, (*arguments, str(LEASE_SECONDS)), self.folder)

    def kill_application(self, name: str) -> None:
        """Kill an application's Java with SIGKILL."""
        application = self.members.pop(name)
        assert isinstance(application, Application)
        self._record_held_shards(name)
        start_time = time.monotonic()
        self.outlived = application.kill_java()
        self.wait_until(
            lambda: name not in self.count_leases(), "the killed application's leases are free", LEASE_SECONDS * 3
        )
        self.released = round(time.monotonic() - start_time, 1)

    def stop_application(self, name: str) -> None:
        application = self.members.pop(name)
        assert isinstance(application, Application)
        self._record_held_shards(name)
        assert application.stop() == 0, application.last_output
        application.kill()

    def _record_held_shards(self, name: str) -> None:
        """Record the shards that the application holds.

        If the last batch is in the sink but not committed, other members repeat the rows of these shards.
        """
        self.held |= {lease.shard for lease in self.read_leases() if _get_member_name(lease.owner) == name}

    # Observations

    def read_leases(self) -> list[Any]:
        return [lease for lease in self.ground.table.list().leases if not lease.ended]

    def count_leases(self) -> Counter[str]:
        """Return how many leases each member holds."""
        return Counter(_get_member_name(lease.owner) for lease in self.read_leases())

    def is_balanced(self) -> bool:
        """Return whether the members hold all leases, each under a single owner name, with balanced loads.

        A load is the sum of the weights of the member's leases, because the rules balance measured throughputs. Loads
        may differ by the weight of one lease.
        """
        leases = self.read_leases()
        known_weights = [lease.weight for lease in leases if lease.weight]
        mean_weight = sum(known_weights) / len(known_weights) if known_weights else 1.0
        loads = dict.fromkeys(self.members, 0.0)
        for lease in leases:
            loads[_get_member_name(lease.owner)] = loads.get(_get_member_name(lease.owner), 0.0) + (
                lease.weight or mean_weight
            )
        all_leases_held = len(leases) >= SHARDS and len({lease.owner for lease in leases}) == len(self.members) == len(
            loads
        )
        return all_leases_held and max(loads.values()) - min(loads.values()) <= max(known_weights, default=1.0)

    def wait_until_balanced(self, event: str) -> None:
        """Wait until the members are balanced, and record their lease counts."""
        self.wait_until(self.is_balanced, f"balance after {event}", SETTLE_SECONDS)
        self.shares[event] = dict(self.count_leases())

    def wait_until(self, condition: Callable[[], object], description: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        next_report = 0.0
        while not condition():
            now = time.monotonic()
            for name, member in list(self.members.items()):
                if isinstance(member, Application) and member.failed_to_start_python:
                    self._restart(name, member)
                    continue
                assert member.is_running, f"{name} ended by itself; its last words:\n{member.last_output}"
            assert now < deadline, f"not within {seconds:g} s: {description}; {dict(self.count_leases())}"
            if now > next_report:
                next_report = now + 10
                self.report(f"sent {self.feed.sent:7,}  {dict(self.count_leases())}  waiting: {description}")
            time.sleep(LOOK_SECONDS)

    def end_members(self) -> None:
        for member in self.members.values():
            member.kill()


def _get_member_name(owner: str | None) -> str:
    return "" if owner is None else owner.rpartition("-")[0]


def play_scenario(run: Run, row_count: int, feed_future: Future[None]) -> tuple[int, int]:
    """Run the scenario. Return how many leases have reached the last record of their shard, and how many there are."""
    actions: tuple[tuple[float, str, Callable[[], object]], ...] = (
        (0.0, "one joined", partial(run.start_application, "one")),
        (0.05, "two joined", partial(run.start_application, "two")),
        (0.1, "plain joined", partial(run.start_plain_worker, "plain")),
        (0.3, "one killed", partial(run.kill_application, "one")),
        (0.5, "one again", partial(run.start_application, "one")),
        (0.6, "split", run.ground.split),
        (0.8, "two stopped", partial(run.stop_application, "two")),
    )
    for index, (share_of_rows, event, action) in enumerate(actions):
        next_share = actions[index + 1][0] if index + 1 < len(actions) else 1.0
        run.feed.limit = int(next_share * row_count)
        # Wait for a little more than the share, so that rows are being sent when the fault happens.
        least_rows = int((share_of_rows + 0.02) * row_count)
        run.wait_until(lambda: run.feed.sent >= least_rows, "rows to be sent", ARRIVE_SECONDS)  # noqa: B023
        run.report(event)
        action()
        run.wait_until_balanced(event)
    run.wait_until(feed_future.done, "the stream to have all rows", ARRIVE_SECONDS)
    feed_future.result()
    return _wait_until_read(run)


def _wait_until_read(run: Run) -> tuple[int, int]:
    mark_numbers = run.ground.put(MARK)

    def count_leases_at_tip() -> int:
        # A shard that was split and is not read to its end has no mark, so its lease never counts as being at the tip.
        leases_with_mark = [
            lease for lease in run.read_leases() if lease.key in mark_numbers and lease.checkpoint.numbered
        ]
        return sum(int(lease.checkpoint.sequence) >= mark_numbers[lease.key] for lease in leases_with_mark)

    run.wait_until(
        lambda: count_leases_at_tip() == len(run.read_leases()),
        "every lease to stand at the last record",
        ARRIVE_SECONDS,
    )
    return count_leases_at_tip(), len(run.read_leases())


def judge_run(run: Run, sent_rows: Sequence[Row], at_tip: tuple[int, int]) -> FlightsResult:
    landed_rows = pd.concat([_read_landed(run.folder / "rows" / name, name) for name in ("one", "two", "plain")])
    flight_rows = landed_rows[landed_rows["data"] != MARK]
    distinct_rows = flight_rows.drop_duplicates(IDENTITY)
    repeated_rows = flight_rows[flight_rows.duplicated(IDENTITY)]
    sent_data, landed_data = {row.data for row in sent_rows}, set(distinct_rows["data"])
    return FlightsResult(
        sent=len(sent_rows),
        landed=len(distinct_rows),
        lost=len(sent_data - landed_data),
        strangers=len(landed_data - sent_data) + len(distinct_rows) - len(landed_data),
        duplicates=len(repeated_rows),
        explained=int(repeated_rows["shardId"].isin(run.held).sum()),
        by=dict(Counter(flight_rows["member"])),
        shares=run.shares,
        outlived=run.outlived,
        released=run.released,
        at_tip=at_tip,
    )


def _list_files(folder: Path) -> list[Path]:
    """Return the files that the log of Spark's file sink lists, or all files if there is no log."""
    logs = list((folder / "_spark_metadata").glob("[0-9]*"))
    if not logs:
        return sorted(path for path in folder.rglob("*.parquet") if not path.name.startswith("."))
    lines = {line for log in logs for line in log.read_text().splitlines()[1:]}
    return sorted(Path(json.loads(line)["path"].removeprefix("file://")) for line in lines)


def _read_landed(folder: Path, member: str) -> pd.DataFrame:
    """Return the rows of this member, with the columns of Kinesis."""
    landed_rows = pd.concat([pq.ParquetFile(path).read().to_pandas() for path in _list_files(folder)])
    landed_rows = landed_rows.rename(columns={"partition": "shardId", "body": "data"})
    if "subSequenceNumber" not in landed_rows:  # events of a hub have no sub-sequence numbers
        landed_rows["subSequenceNumber"] = 0
    landed_rows["sequenceNumber"] = landed_rows["sequenceNumber"].astype(str)
    return landed_rows[[*IDENTITY, "data"]].assign(member=member)


def run_flights(
    environment: Ground, sent_rows: Sequence[Row], folder: Path, *, rate: int, report: Callable[[str], None]
) -> FlightsResult:
    """Run the scenario with this stream and lease table, keeping files in this folder, and return the result."""
    with ExitStack() as stack:
        for name in ("one", "two", "plain"):
            (folder / "rows" / name).mkdir(parents=True)
        run = Run(environment, folder, environment.feed(sent_rows, rate), report)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(run.feed.end)
        stack.callback(run.end_members)
        feed_future = pool.submit(run.feed)
        return judge_run(run, sent_rows, play_scenario(run, len(sent_rows), feed_future))


def format_result(result: FlightsResult) -> str:
    return json.dumps(asdict(result), indent=2) + "\n"


def main() -> int:
    parser = create_parser("Share flights between Spark and plain Python; print what came of it.")
    parser.add_argument("--rows", type=int, default=ROWS, help="how many (%(default)s)")
    parser.add_argument("--rate", type=int, default=3_000, help="rows a second at most (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write, and to leave it (a folder that goes again)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        environment = stack.enter_context(open_environment(arguments))
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-spark-")))
        result = run_flights(
            environment, list(read_rows(arguments.rows)), folder, rate=arguments.rate, report=print_to_stderr
        )
    sys.stdout.write(format_result(result))
    return 0 if (result.lost, result.strangers) == (0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
