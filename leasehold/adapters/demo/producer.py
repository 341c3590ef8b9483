"""The demo's producer, a process of its own: it puts steadily, and writes down what the stream acknowledged.

python -m leasehold.adapters.demo.producer ENDPOINT STREAM RECORDS_PER_SECOND
"""

import json
import signal
import sys
from collections import Counter
from hashlib import sha1
from itertools import count
from threading import Event

from leasehold.adapters.demo.stream import client, put
from leasehold.adapters.history.events import Sent

KEYS = 40
PUTS_PER_SECOND = 5


def sent_of(line: str | bytes) -> Sent:
    """Read a line that the producer wrote for a record it sent."""
    key, number, digest = json.loads(line)
    return Sent(key, number, digest)


def produce(endpoint: str, stream: str, rate: int, ending: Event) -> None:
    """Put `rate` records a second until told to end; each carries its key and how many of the key came before."""
    to, numbers, places = client(endpoint), Counter[str](), count()
    while not ending.is_set():
        rows, lines = [], []
        for _ in range(max(1, rate // PUTS_PER_SECOND)):
            key = f"sensor-{next(places) % KEYS:02}"
            numbers[key] += 1
            data = json.dumps({"key": key, "number": numbers[key]}).encode()
            rows.append((key, data))
            lines.append(json.dumps((key, numbers[key], sha1(data, usedforsecurity=False).hexdigest())))
        put(to, stream, rows)
        print(*lines, sep="\n", flush=True)  # noqa: T201  the record of what must not be lost
        ending.wait(1 / PUTS_PER_SECOND)


def main(endpoint: str, stream: str, rate: str) -> None:
    """Produce until SIGTERM."""
    ending = Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: ending.set())
    produce(endpoint, stream, int(rate), ending)


if __name__ == "__main__":
    main(*sys.argv[1:])
