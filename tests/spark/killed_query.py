"""A process that drives a query as Spark does, with Spark's own logs, and kills itself at a bad moment.

    python killed_query.py FOLDER dies|lives

FOLDER holds `stream.json` (records by shard), the leases, and two logs in Spark's place: `offsets`, written before a
batch is run, and `commits`, written after it. The sink runs every batch and then skips one whose number it knows.
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
        """Run one batch as Spark does: its offset is logged before, and its commit after."""
        self._write("offsets", number, end)
        rows = self.query.run(end)
        written = self.folder / "sink" / str(number)
        if written.exists():
            self._write("repeated", number, json.loads(written.read_text()) == [list(row) for row in rows])
        else:
            self._write("sink", number, rows)
            if self.how == "dies" and rows:
                os.kill(os.getpid(), signal.SIGKILL)
        self._write("commits", number, end)
        self.query.offset = end

    def _write(self, kind: str, number: int, value: Any) -> None:  # noqa: ANN401  whatever JSON takes
        hidden = self.folder / kind / f".{number}"
        hidden.write_text(json.dumps(value))
        hidden.rename(self.folder / kind / str(number))


def read(folder: Path, kind: str) -> dict[int, Any]:
    """Return what was written of a kind, by batch."""
    return {int(path.name): json.loads(path.read_text()) for path in (folder / kind).glob("[0-9]*")}


def main(folder: Path, behavior: str) -> None:
    """Repeat what was planned but not committed, then continue until killed or until the sink has everything."""
    stream = Stream(json.loads((folder / "stream.json").read_text()))
    offsets, commits = read(folder, "offsets"), read(folder, "commits")
    last_commit = max(commits, default=0)
    place = Place(stream, folder / "leases.db")
    query = place.query(commits.get(last_commit), **LIMIT)  # type: ignore[arg-type]  # none of the names is an argument's
    life = Life(folder, query, behavior)
    if last_commit + 1 in offsets:
        life.batch(last_commit + 1, offsets[last_commit + 1])
    whole = {(key, number) for key, texts in stream.records.items() for number in range(1, len(texts) + 1)}
    while whole - {(key, number) for rows in read(folder, "sink").values() for key, number, _ in rows}:
        before, end = life.query.offset, life.query.plan()
        assert end is not None, "no batch in time"
        if before["n"]:
            life.query.reader.commit(before)
        life.batch(max(read(folder, "commits"), default=0) + 1, end)
    place.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
