"""SIGKILLs aimed at the moment when a sink has a batch and Spark does not know it yet.

    python tests/integration/spark_kills.py --help

The sink runs every frame and then skips a batch whose number it knows, which is the kind that loses what a
repetition has more than the first time. Each run repeats the batch that the run before was killed in, does one
more, and is killed in that; the last is let live, over what is there then.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import asdict, define, frozen
from flights import Row, to_stderr
from pyspark.sql import DataFrame
from spark_application import LATE
from spark_flights import rows
from spark_ground import Ground, a_ground, options
from standins.spark import spark_session

from leasehold.adapters.demo.child import Child

LEASE_SECONDS = 6.0
ROUND_SECONDS, LEAVE_SECONDS = 240.0, 20.0
KILLED = 256 - signal.SIGKILL
COLUMNS = {
    "kinesis-leased": ("shardId", "sequenceNumber", "subSequenceNumber", "data"),
    "eventhubs-leased": ("partition", "sequenceNumber", "offset", "body"),
}


@define
class Sink:
    """Writes each batch to a file of its number; where there is one, it compares and leaves it.

    before_commit  called when a new batch is written, and Spark does not know it yet
    """

    folder: Path
    columns: Sequence[str]
    before_commit: Callable[[], None]

    def __call__(self, frame: DataFrame, number: int) -> None:
        """One batch."""
        found = [list(row) for row in frame.select(*self.columns).collect()]
        batch = sorted([*map(str, row[:-1]), bytes(row[-1]).decode()] for row in found)
        path = self.folder / f"{number}.json"
        if path.exists():
            line = json.dumps({"batch": number, "rows": len(batch), "same": batch == json.loads(path.read_text())})
            with (self.folder / "repeated.jsonl").open("a") as repeated:
                repeated.write(f"{line}\n")
            return
        hidden = path.with_suffix(".part")
        hidden.write_text(json.dumps(batch))
        hidden.rename(path)
        if batch:
            self.before_commit()


def victim(folder: Path, source: str, words: Sequence[str], *, dies: bool) -> int:
    """One application: killed in its first new batch, or living until everything is read."""
    with spark_session(1) as spark:
        gateway: Any = spark.sparkContext._gateway  # noqa: SLF001  nobody else knows which process it is
        java = gateway.proc.pid

        def kill() -> None:
            os.kill(java, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        sink = Sink(folder, COLUMNS[source], kill if dies else lambda: None)
        given = dict(each.split("=", 1) for each in words)
        writer = spark.readStream.format(source).options(**given).load().writeStream.foreachBatch(sink)
        writer = writer.option("checkpointLocation", str(folder / "progress"))
        query = (writer if dies else writer.trigger(availableNow=True)).start()
        query.awaitTermination()
    return 0


@frozen
class Found:
    """What a run came to.

    kills     how many fell between sink and commit
    repeated  batches that came again, and of these with the very same rows
    sent      rows; of these `lost` are in no batch
    doubled   rows in more than one batch
    owned     leases still owned in the end
    """

    kills: int
    repeated: int
    same: int
    sent: int
    lost: int
    doubled: int
    owned: int


class Victim(Child):
    """One application, whose reading process outlives it for a moment."""

    def leave(self) -> None:
        """Let what hung on it end by itself: cut off in the middle of a request, it would take dynalite with it."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def tried(ground: Ground, folder: Path, *, kills: int, told: Callable[[str], None]) -> Found:
    """Kill so often; what came of it."""
    sent = list(rows(200 * (kills + 1)))
    words = (*ground.options, f"lease.store={ground.store}", f"lease.durationMs={LEASE_SECONDS * 1000:g}")
    for life in range(kills + 1):
        ground.send(sent[200 * life : 200 * (life + 1)])
        began, dies = time.monotonic(), life < kills
        while not _lived(folder, ground.format, words, dies=dies):
            told("the machine is too busy to start Python in time, trying again")
        told(f"life {life}: over after {time.monotonic() - began:.0f} s")
    return _found(ground, folder, sent, kills)


def _lived(folder: Path, source: str, given: Sequence[str], *, dies: bool) -> bool:
    """Whether a life ended as it was to: by its own hand, or having read everything."""
    words = (__file__, "--victim", "dies" if dies else "lives", str(folder), source, *given)
    child = Victim("victim", words, folder)
    deadline = time.monotonic() + ROUND_SECONDS
    try:
        while child.running:
            assert time.monotonic() < deadline, child.said
            time.sleep(0.2)
        ended = child.wait()
        as_meant = ended == (KILLED if dies else 0)
        assert as_meant or LATE in (folder / "victim.log").read_text(), child.said
        return as_meant
    finally:
        child.leave()
        child.kill()


def _found(ground: Ground, folder: Path, sent: Sequence[Row], kills: int) -> Found:
    batches = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    places = Counter(tuple(row[:-1]) for batch in batches for row in batch)
    data = {row[-1] for batch in batches for row in batch}
    repeated: list[dict[str, Any]] = [json.loads(line) for line in (folder / "repeated.jsonl").read_text().splitlines()]
    return Found(
        kills=kills,
        repeated=len(repeated),
        same=sum(each["same"] for each in repeated),
        sent=len(sent),
        lost=len({row.data.decode() for row in sent} - data),
        doubled=sum(count - 1 for count in places.values()),
        owned=sum(lease.owner is not None for lease in ground.table.list().leases),
    )


def main() -> int:
    """Run it by hand, or be one of the killed."""
    if sys.argv[1:2] == ["--victim"]:
        dies, place, source, *words = sys.argv[2:]
        return victim(Path(place), source, words, dies=dies == "dies")
    asked = options("Kill a query between its sink and Spark's commit, again and again.")
    asked.add_argument("--kills", type=int, default=20, help="how often (%(default)s)")
    given = asked.parse_args()
    with ExitStack() as stack:
        ground = stack.enter_context(a_ground(given))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="leasehold-kills-")))
        found = tried(ground, folder, kills=given.kills, told=to_stderr)
    sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    return 0 if (found.lost, found.repeated - found.same, found.owned) == (0, 0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
