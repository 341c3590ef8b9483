"""A plain Python worker that writes its records to files next to those of the Spark applications, with equal columns.

python lab/spark/landing.py SOURCE_URL STORE_URL FOLDER NAME SECONDS
"""

import logging
import os
import sys
from itertools import count
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # pyarrow ships no types

from leasehold import Delivery, run
from leasehold.adapters.options import Options

ROW_SCHEMA = pa.schema(
    [
        *(("shardId", pa.string()), ("sequenceNumber", pa.string()), ("subSequenceNumber", pa.int64())),
        ("data", pa.binary()),
    ]
)


class ParquetWriter:
    """Writes each batch to a separate file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()

    def __call__(self, delivery: Delivery) -> None:
        rows = [
            {
                "shardId": delivery.shard,
                "sequenceNumber": record.sequence_number,
                "subSequenceNumber": record.sub_sequence_number,
                "data": record.data,
            }
            for record in delivery.records
        ]
        name = f"{os.getpid()}-{next(self._numbers)}.parquet"
        hidden_path = self._folder / f".{name}"
        pq.write_table(pa.Table.from_pylist(rows, ROW_SCHEMA), hidden_path)
        hidden_path.rename(self._folder / name)  # so readers of the folder see only complete files


def main(source: str, store: str, folder: str, name: str, seconds: str) -> int:
    """Read until the process is asked to end."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = Options(worker=f"{name}-{os.getpid()}", lease_seconds=float(seconds), initial_position="TRIM_HORIZON")
    run(source, ParquetWriter(Path(folder)), leases=store, **options)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
