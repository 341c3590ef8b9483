"""Files of a directory as shards: each line is a record, and the place where it ends its sequence number.

`python directory.py FOLDER leases.db worker-1` prints the lines of the folder's files, as long as it runs; start it as
often as you like, each time under another name, and the files are shared. Lines may be appended at any time.
"""

import sys
from pathlib import Path

from leasehold import Delivery, Lease, Position, Record, Shard, run
from leasehold.adapters.sources.protocol import Batch


class Directory:
    """The source: every file `*.log` is a shard that never ends."""

    stream = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shards(self) -> tuple[Shard, ...]:
        """All of them; who finds one without a lease creates it."""
        return tuple(Shard(path.name) for path in sorted(self.folder.glob("*.log")))

    def gone(self, shard: str) -> bool:
        """Whether the file was deleted."""
        return not (self.folder / shard).exists()

    def latest(self, lease: Lease) -> Position:
        """The end of the file as it is now: where LATEST begins."""
        return Position(str((self.folder / lease.shard).stat().st_size))

    def open(self, lease: Lease, start: Position) -> "Lines":
        """Read on behind this checkpoint."""
        return Lines(self.folder / lease.shard, int(start.sequence) if start.numbered else 0)

    def close(self) -> None:
        """Nothing stays open."""


class Lines:
    """The reader of one file: some lines at a time, and it never waits."""

    def __init__(self, path: Path, at: int) -> None:
        self.path, self.at = path, at

    def read(self) -> Batch:
        """The next whole lines; none is an answer too."""
        records = []
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file.readlines(64 * 1024):
                if line.endswith(b"\n"):  # else somebody is still writing it
                    self.at += len(line)
                    records.append(Record(line.rstrip(b"\n"), str(self.at)))
        return Batch(records, records[-1].position if records else None, behind_seconds=None, wait_seconds=0.2)

    def close(self) -> None:
        """Nothing stays open."""


def show(batch: Delivery) -> None:
    """A handler."""
    for record in batch.records:
        print(batch.shard, batch.epoch, record.data.decode(), flush=True)


if __name__ == "__main__":
    folder, leases, me = sys.argv[1:]
    run(Directory(Path(folder)), show, leases=f"sqlite://{leases}", worker=me, initial_position="TRIM_HORIZON")
