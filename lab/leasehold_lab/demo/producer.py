"""The producer of the demo. It puts records at a constant rate, and prints those that the stream acknowledged.

The producer runs in a separate process: python -m leasehold_lab.demo.producer ENDPOINT STREAM RECORDS_PER_SECOND
"""

import json
import signal
import sys
from hashlib import sha1
from threading import Event

from leasehold.adapters.signals import replace_handler
from leasehold_lab.demo.dev import KeyedRows, put_rows
from leasehold_lab.demo.stage import create_kinesis_client, put_records
from leasehold_lab.judge.events import SentRecord


def parse_sent_record(line: str | bytes) -> SentRecord:
    """Parse a line of the producer's output."""
    key, number, digest = json.loads(line)
    return SentRecord(key, number, digest)


def produce_records(endpoint: str, stream: str, rate: int, stop_event: Event) -> None:
    """Put `rate` records per second until `stop_event` is set, and print each record that the stream acknowledged."""
    stream_client = create_kinesis_client(endpoint)

    def print_acknowledged(rows: KeyedRows) -> None:
        put_records(stream_client, stream, rows)
        sent_records = (
            (key, json.loads(data)["number"], sha1(data, usedforsecurity=False).hexdigest()) for key, data in rows
        )
        print(*map(json.dumps, sent_records), sep="\n", flush=True)  # noqa: T201  the checker looks for these records

    put_rows(rate, print_acknowledged, stop_event)


def main(endpoint: str, stream: str, rate: str) -> None:
    """Produce records until the process receives SIGTERM."""
    stop_event = Event()
    replace_handler(signal.SIGTERM, lambda _number, _frame: stop_event.set())
    produce_records(endpoint, stream, int(rate), stop_event)


if __name__ == "__main__":
    main(*sys.argv[1:])
