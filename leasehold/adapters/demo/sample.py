"""Sample data for a developer: records of forty keys at a rate, each key in order."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.sample"))

KEYS = 40
PUTS_PER_SECOND = 5

KeyedRows = list[tuple[str, bytes]]
"""Partition keys, each with a record."""


@contextmanager
def sampled(name: str, rate: int, put: Callable[[KeyedRows], object]) -> Iterator[None]:
    """Put so many records a second by a thread of its own until the block ends; none at a rate of 0."""
    if not rate:
        yield
        return
    ending = threading.Event()
    producing = spawn(
        f"sample-{name}",
        lambda: put_rows(rate, put, ending),
        lambda fault: log.error("no more sample data for %s: %s", name, said(fault)),
    )
    try:
        yield
    finally:
        ending.set()
        producing.join()


def put_rows(rate: int, put: Callable[[KeyedRows], object], ending: threading.Event) -> None:
    """Put records until told to end; each carries its key and how many of the key came before."""
    numbers, places = Counter[str](), count()
    pause = max(1 / PUTS_PER_SECOND, 1 / rate)
    while not ending.is_set():
        rows: KeyedRows = []
        for _ in range(max(1, round(rate * pause))):
            key = f"sensor-{next(places) % KEYS:02}"
            numbers[key] += 1
            rows.append((key, json.dumps({"key": key, "number": numbers[key]}).encode()))
        put(rows)
        ending.wait(pause)
