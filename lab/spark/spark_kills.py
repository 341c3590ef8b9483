"""Kills queries with SIGKILL when a sink has a batch that Spark has not committed yet.

    python lab/spark/spark_kills.py --help

The sink computes each batch, but skips it if it already has a batch of this number. Such a sink loses rows if a
repeated batch contains additional rows. Each run repeats the batch in which the previous run was killed, processes one
more batch, and is killed in that batch. The last run continues until it has read everything.

With `--drawn`, each batch with rows leads to a random kill, of the process that plans or of the application. The kill
happens before or after the sink has the batch.

With `--cluster`, the application runs on a cluster of a master and two workers. The kills are random, and executors are
killed too, which a run survives.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attrs import asdict, define, frozen
from flights import Row, print_to_stderr
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from spark_flights import read_rows
from spark_ground import Ground, create_parser, open_environment
from spark_killer import (
    HERE,
    MARK,
    ON_CLUSTER,
    Killer,
    read_json_lines,
    read_kills,
    read_leftovers,
    record_leftovers,
    run_cluster,
)
from standins.spark import LATE, SOON, spark_session
from standins.spark import ON_CLUSTER as CLUSTER_SETTINGS

from leasehold.adapters.spark.pipeline import start_query
from leasehold_lab.demo.child import Child

LEASE_SECONDS = 6.0
DRAWN_ROWS = 60
"""The maximum number of rows per batch in a run with random kills."""
ROUND_SECONDS, LEAVE_SECONDS = 600.0, 20.0
KILLED, PLANNER_DIED = 256 - signal.SIGKILL, 3
COLUMNS = {
    "kinesis-leased": ("shardId", "sequenceNumber", "subSequenceNumber", "data"),
    "eventhubs-leased": ("partition", "sequenceNumber", "offset", "body"),
}


@define
class Sink:
    """Writes each batch to a file named after its number. If the file exists, the batch is only compared with it.

    Attributes:
        kill: Called for each new batch with the number of the batch and a moment. The moment is "before" if the
            sink has not read the batch yet, and "behind" if the sink has written a batch with rows and Spark does not
            know it yet.
    """

    folder: Path
    columns: Sequence[str]
    kill: Callable[[int, str], None]

    def __call__(self, batch_frame: DataFrame, batch_number: int) -> None:
        path = self.folder / f"{batch_number}.json"
        if not path.exists():
            self.kill(batch_number, "before")
        batch_rows = [list(row) for row in batch_frame.select(*self.columns).collect()]
        sorted_rows = sorted([*map(str, row[:-1]), bytes(row[-1]).decode()] for row in batch_rows)
        if path.exists():
            report_line = json.dumps(
                {"batch": batch_number, "rows": len(sorted_rows), "same": sorted_rows == json.loads(path.read_text())}
            )
            with (self.folder / "repeated.jsonl").open("a") as report_file:
                report_file.write(f"{report_line}\n")
            return
        partial_path = path.with_suffix(".part")
        partial_path.write_text(json.dumps(sorted_rows))
        partial_path.rename(path)
        if sorted_rows:
            self.kill(batch_number, "behind")


def run_until_killed(folder: Path, source: str, options: Sequence[str], mode: str, master: str) -> int:
    """Run an application until it is killed in a new batch, or until it has read everything."""
    cluster_settings = CLUSTER_SETTINGS | {
        f"spark.executorEnv.{MARK}": str(folder),
        "spark.executor.extraJavaOptions": SOON,
    }
    with spark_session(1, SOON if master else "", master=master, settings=cluster_settings if master else {}) as spark:
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  the only reference to the Java process
        killer = Killer(folder, gateway.proc.pid, mode.removeprefix("dies"), ON_CLUSTER if master else HERE)
        may_die = mode.startswith("dies")
        sink = Sink(folder, COLUMNS[source], killer if may_die else lambda _number, _moment: None)
        source_options = dict(option.split("=", 1) for option in options)

        def start() -> StreamingQuery:
            writer = spark.readStream.format(source).options(**source_options).load().writeStream.foreachBatch(sink)
            writer = writer.option("checkpointLocation", str(folder / "progress"))
            return (writer if may_die else writer.trigger(availableNow=True)).start()

        query = start_query(start)
        try:
            query.awaitTermination()
        except StreamingQueryException:
            if not killer.planner_died:
                raise
            return PLANNER_DIED
    return 0


@frozen
class KillsResult:
    """The result of a run.

    Attributes:
        kills: The number of kills.
        died: The number of kills of each kind of process.
        repeated: The number of batches that were repeated.
        same: The number of repeated batches that had exactly the same rows.
        sent: The number of rows that were sent.
        lost: The number of rows that are in no batch.
        doubled: The number of repeated rows in the batches.
        owned: The number of leases that still have an owner at the end.
        left: The number of processes on a cluster that did not end with their application.
    """

    kills: int
    died: Mapping[str, int]
    repeated: int
    same: int
    sent: int
    lost: int
    doubled: int
    owned: int
    left: int


class KilledApplication(Child):
    """An application whose reader process outlives it for a moment."""

    def wait_for_remaining(self) -> None:
        """Wait for the remaining processes to end by themselves, because an interrupted request crashes dynalite."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def run_kills(
    environment: Ground,
    folder: Path,
    *,
    kills: int,
    report: Callable[[str], None],
    seed: int | None = None,
    master: str = "",
) -> KillsResult:
    """Kill processes `kills` times, or once more, and return the result.

    Args:
        environment: The stream and the lease table.
        folder: The folder for the files of the run.
        kills: The number of kills.
        report: Called with lines about the progress.
        seed: Determines the random kills. If None, each application is killed as soon as its sink has a batch.
        master: The address of the cluster's master, or "" if there is no cluster.
    """
    sent_rows = list[Row]()
    flight_rows = read_rows(200 * (kills + 1))
    arguments = (*environment.options, f"lease.store={environment.store}", f"lease.durationMs={LEASE_SECONDS * 1000:g}")
    if seed is not None:
        arguments += (f"maxRowsPerTrigger={DRAWN_ROWS}",)
    while True:
        should_die = len(read_kills(folder)) < kills
        mode = f"dies{'' if seed is None else seed}" if should_die else "lives"
        new_rows = list(islice(flight_rows, 200))
        environment.send(new_rows)
        sent_rows += new_rows
        start_time = time.monotonic()
        while not _run_victim(folder, environment.format, arguments, mode=mode, master=master):
            report("the machine is too busy to start Python in time, trying again")
        report(f"{len(read_kills(folder))} kills: over after {time.monotonic() - start_time:.0f} s")
        if not should_die:
            return _build_result(environment, folder, sent_rows)


def _run_victim(folder: Path, source: str, query_options: Sequence[str], *, mode: str, master: str) -> bool:
    """Return whether an application ended as planned, either by a kill or after it had read everything."""
    arguments = (__file__, "--victim", mode, str(folder), source, master, *query_options)
    with patch.dict(os.environ, {MARK: str(folder)}):
        child = KilledApplication("victim", arguments, folder)
    deadline = time.monotonic() + ROUND_SECONDS
    try:
        while child.is_running:
            assert time.monotonic() < deadline, child.last_output
            time.sleep(0.2)
        exit_status = child.wait()
        ended_as_planned = exit_status in ((KILLED, PLANNER_DIED) if mode != "lives" else (0,))
        assert ended_as_planned or LATE in (folder / "victim.log").read_text(), child.last_output
        return ended_as_planned
    finally:
        if master:
            record_leftovers(folder)
        child.wait_for_remaining()
        child.kill()


def _build_result(environment: Ground, folder: Path, sent_rows: Sequence[Row]) -> KillsResult:
    batches = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    deliveries_by_position = Counter(tuple(row[:-1]) for batch in batches for row in batch)
    delivered_data = {row[-1] for batch in batches for row in batch}
    repetitions = read_json_lines(folder / "repeated.jsonl")
    kills = read_kills(folder)
    return KillsResult(
        kills=len(kills),
        died=dict(Counter(process_kind for process_kind, _, _ in kills)),
        repeated=len(repetitions),
        same=sum(repetition["same"] for repetition in repetitions),
        sent=len(sent_rows),
        lost=len({row.data.decode() for row in sent_rows} - delivered_data),
        doubled=sum(count - 1 for count in deliveries_by_position.values()),
        owned=sum(lease.owner is not None for lease in environment.table.list().leases),
        left=len(read_leftovers(folder)),
    )


def main() -> int:
    """Run the program by hand, or as one of the killed applications."""
    if sys.argv[1:2] == ["--victim"]:
        mode, folder_path, source, master, *query_options = sys.argv[2:]
        return run_until_killed(Path(folder_path), source, query_options, mode, master)
    parser = create_parser("Kill a query between its sink and Spark's commit, again and again.")
    parser.add_argument("--kills", type=int, default=20, help="how often (%(default)s)")
    parser.add_argument("--drawn", action="store_true", help="draw what is killed, and when; see above")
    parser.add_argument("--seed", type=int, default=0, help="what is killed when, where that is drawn (%(default)s)")
    parser.add_argument("--cluster", action="store_true", help="draw kills on a cluster of this machine")
    arguments = parser.parse_args()
    is_random = arguments.drawn or arguments.cluster
    with ExitStack() as stack:
        environment = stack.enter_context(open_environment(arguments))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-kills-")))
        master = stack.enter_context(run_cluster()) if arguments.cluster else ""
        result = run_kills(
            environment,
            folder,
            kills=arguments.kills,
            report=print_to_stderr,
            seed=arguments.seed if is_random else None,
            master=master,
        )
    sys.stdout.write(json.dumps(asdict(result), indent=2) + "\n")
    unexpected_repeats = result.doubled if is_random else 0  # otherwise, the last batch from Event Hubs may be repeated
    faults = (result.lost, result.repeated - result.same, result.owned, result.left, unexpected_repeats)
    return 0 if not any(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
