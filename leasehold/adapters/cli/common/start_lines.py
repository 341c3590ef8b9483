"""Prints the lines that `consume` shows on a terminal when it joins, takes a lease, and ends.

If standard error is a file or a pipe, `consume` writes only warnings there. With `--verbose` it logs all events.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from leasehold.adapters.worker.worker import Worker
from leasehold.stores.printable import printable


class _TakenLeasesHandler(logging.Handler):
    """A log handler that prints a line for each lease that the worker takes."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        if (reason := getattr(record, "taken", None)) is not None:
            lease, rule = record.__dict__["lease"], record.__dict__["rule"]
            _print_line(f"took {lease}: {reason} ({rule}); {self._worker.discovery.open_shards} shards are open")


@contextmanager
def print_start_lines(worker: Worker, source: str, store: str) -> Iterator[None]:
    """Print the lines to standard error while the worker runs, if standard error is a terminal.

    Args:
        worker: The worker.
        source: The URL of the stream.
        store: The URL of the lease table.
    """
    if not (sys.stderr and sys.stderr.isatty()):
        yield
        return
    rules_name = worker.config.rules.name
    _print_line(
        f"{worker.me} joined: reads {source} with leases in {store}; rules {rules_name}, "
        f"leasehold {version('leasehold')}"
    )
    _print_line(f"to see who reads what: leasehold leases '{store}'")
    log, handler = logging.getLogger("leasehold.worker"), _TakenLeasesHandler(worker)
    original_level, shown_level, other_handlers = log.level, log.getEffectiveLevel(), logging.getLogger().handlers

    def was_shown_before(record: logging.LogRecord) -> bool:
        return record.levelno >= shown_level or record.name != log.name

    log.addHandler(handler)
    for other_handler in other_handlers:
        other_handler.addFilter(was_shown_before)
    log.setLevel(min(logging.INFO, shown_level))
    try:
        yield
    finally:
        log.removeHandler(handler)
        for other_handler in other_handlers:
            other_handler.removeFilter(was_shown_before)
        log.setLevel(original_level)
        _print_line(f"{worker.me} ended")


def _print_line(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
