"""Runs a worker in this process until a signal ends it.

A signal to end (SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup) drains: the running batch is
finished, checkpointed, and its lease released; a second one ends the process at once, and its leases wait for expiry.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.adapters.reading.exporting import Meter
from leasehold.adapters.reading.handling import Handler, Handling
from leasehold.adapters.reading.runner import DRAIN_SECONDS, MEMORY_BYTES, READERS, WRITERS, Runner
from leasehold.adapters.worker.worker import Worker

HANGUP = getattr(signal, "SIGHUP", None)
"""There is none on Windows."""
ENDING = (signal.SIGTERM, signal.SIGINT, *((HANGUP,) if HANGUP else ()))


def run(
    worker: Worker,
    handling: Handling | Handler,
    *,
    readers: int = READERS,
    writers: int = WRITERS,
    meter: Meter | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> None:
    """Run a worker in this process until a signal ends it.

    In a thread other than the main one no signal is listened to: use a `Runner` and its `stop`.

    Examples:
        >>> from leasehold.adapters import run
        >>> def consume(worker) -> None:
        ...     run(worker, print)  # until a signal ends it
    """
    runner = Runner(
        worker,
        handling,
        readers=readers,
        writers=writers,
        meter=meter,
        drain_seconds=drain_seconds,
        memory_bytes=memory_bytes,
    )
    with stopping_on_signals(runner):
        runner.run()


def endings() -> list[signal.Signals]:
    """The signals that end a worker of this process."""
    return [each for each in ENDING if each != HANGUP or signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def stopping_on_signals(runner: Runner) -> Iterator[None]:
    """In the main thread: while this lasts, a signal to end stops the runner, and a second one ends the process."""
    ending = endings()

    def stop(_number: int, _frame: object) -> None:
        for each in ending:
            signal.signal(each, signal.SIG_DFL)  # the next one ends the process at once
        runner.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, stop) for each in ending}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
