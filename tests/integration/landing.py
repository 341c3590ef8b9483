"""A plain Python worker that lands what it reads next to the Spark applications, in the same columns.

python tests/integration/landing.py SOURCE_URL STORE_URL FOLDER NAME SECONDS
"""

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # likewise

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.consumer.runner import run
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.stores.urls import open_store

FIELDS = (
    *(("number", pa.int32()), ("carrier", pa.string()), ("tailnum", pa.string())),
    *(("distance", pa.float64()), ("at", pa.timestamp("us", "UTC"))),
)
"""The fields of a flight that are sent, as CSV; `number` is unique among all flights."""

LANDED = pa.schema(
    [
        *(("shardId", pa.string()), ("sequenceNumber", pa.string()), ("subSequenceNumber", pa.int64())),
        *(("arrived", pa.timestamp("us", "UTC")), ("row", pa.struct(FIELDS)), ("data", pa.binary())),
    ]
)


class Landing:
    """Writes each batch as files of its own, by kind and date, as the applications' sinks do."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()

    def __call__(self, delivery: Delivery) -> None:
        shelves = defaultdict[str, list[dict[str, Any]]](list)
        for record in delivery.records:
            row = parsed(record.data)
            day = row["at"] if row else datetime.fromtimestamp(record.arrived or 0.0).astimezone()
            shelves[f"kind={'row' if row else 'dead-letter'}/date={day:%Y-%m-%d}"].append(
                _landed(delivery, record, row)
            )
        for place, rows in shelves.items():
            self._write(self._folder / place, rows)

    def _write(self, folder: Path, rows: Iterable[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{os.getpid()}-{next(self._numbers)}.parquet"
        hidden = folder / f".{name}"
        pq.write_table(pa.Table.from_pylist(list(rows), LANDED), hidden)
        hidden.rename(folder / name)  # readers of the folder see whole files only


def _landed(delivery: Delivery, record: Record, row: dict[str, Any] | None) -> dict[str, Any]:
    place = {"sequenceNumber": record.sequence_number, "subSequenceNumber": record.sub_sequence_number}
    arrived = None if record.arrived is None else round(record.arrived * 1e6)
    data = None if row else record.data
    return {"shardId": delivery.shard, **place, "arrived": arrived, "row": row, "data": data}


def parsed(data: bytes) -> dict[str, Any] | None:
    """Return a flight's fields, or None if the record is no flight."""
    fields = data.decode().split(",")
    if len(fields) != len(FIELDS):
        return None
    number, carrier, tail, distance, at = fields
    return {
        "number": int(number),
        "carrier": carrier,
        "tailnum": tail or None,
        "distance": float(distance),
        "at": datetime.fromisoformat(at),
    }


def main(source: str, store: str, folder: str, name: str, seconds: str) -> int:
    """Read until told to end."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = Config(lease_seconds=float(seconds), initial_position=TRIM_HORIZON)
    worker = Worker(store=open_store(store), source=open_source(source), me=f"{name}-{os.getpid()}", config=config)
    run(worker, Landing(Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
