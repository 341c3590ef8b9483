"""A program that runs a query as Spark does, with logs like Spark's, and kills itself before a batch is committed.

    python killed_query.py FOLDER dies|lives

FOLDER contains `stream.json` (records by shard), the leases, and two logs like Spark's: `offsets`, written before a
batch is run, and `commits`, written after it. The sink computes every batch, and then skips the batches whose numbers
it knows.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from attrs import define
from fake_stream import Place, Query, Stream

LIMIT = {"maxRowsPerTrigger": "7", "lease.durationMs": "1000"}


@define
class Life:
    """One run of the query."""

    folder: Path
    query: Query
    how: str

    def batch(self, number: int, end: dict[str, Any]) -> None:
        """Run one batch as Spark does. Its offset was logged before, and its commit is logged afterwards."""
        self._write("offsets", number, end)
        rows = self.query.run(end)
        sink_file = self.folder / "sink" / str(number)
        if sink_file.exists():
            self._write("repeated", number, json.loads(sink_file.read_text()) == [list(row) for row in rows])
        else:
            self._write("sink", number, rows)
            if self.how == "dies" and rows:
                os.kill(os.getpid(), signal.SIGKILL)
        self._write("commits", number, end)
        self.query.offset = end

    def _write(self, kind: str, number: int, value: Any) -> None:  # noqa: ANN401  whatever JSON takes
        temporary_file = self.folder / kind / f".{number}"
        temporary_file.write_text(json.dumps(value))
        temporary_file.rename(self.folder / kind / str(number))


def read(folder: Path, kind: str) -> dict[int, Any]:
    """Return the files of this kind, by the number of the batch."""
    return {int(path.name): json.loads(path.read_text()) for path in (folder / kind).glob("[0-9]*")}


def main(folder: Path, behavior: str) -> None:
    """Repeat a batch that was planned but not committed.

    Then continue until killed, or until the sink has all records.
    """
    stream = Stream(json.loads((folder / "stream.json").read_text()))
    offsets, commits = read(folder, "offsets"), read(folder, "commits")
    last_commit = max(commits, default=0)
    environment = Place(stream, folder / "leases.db")
    query = environment.query(commits.get(last_commit), **LIMIT)  # type: ignore[arg-type]  # none of the names is an argument's
    run = Life(folder, query, behavior)
    if last_commit + 1 in offsets:
        run.batch(last_commit + 1, offsets[last_commit + 1])
    all_records = {(key, number) for key, texts in stream.records.items() for number in range(1, len(texts) + 1)}
    while all_records - {(key, number) for rows in read(folder, "sink").values() for key, number, _ in rows}:
        start_offset, end = run.query.offset, run.query.plan()
        assert end is not None, "no batch in time"
        if start_offset["n"]:
            run.query.reader.commit(start_offset)
        run.batch(max(read(folder, "commits"), default=0) + 1, end)
    environment.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
