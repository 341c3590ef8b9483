"""The threads and queues that a worker runs on."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.adapters.sources.clock import seconds
from leasehold.adapters.threads import ThreadQueue


@contextmanager
def received_elsewhere() -> Iterator[None]:
    """The system gives SIGUSR1 to another thread than the main one."""
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        over.set()
        other.join()


def test_a_signal_that_another_thread_receives_ends_the_wait_of_the_main_thread() -> None:
    """A worker that was starting a thread when SIGTERM came went on for ever, and was killed after its grace period."""
    queue = ThreadQueue(seconds)
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: queue.put("signal"))
    too_late = threading.Timer(20, queue.put, ["nothing"])
    too_late.start()
    try:
        with received_elsewhere():
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            assert queue.get() == "signal"
    finally:
        too_late.cancel()
        signal.signal(signal.SIGUSR1, before)


def test_a_queue_waits_until_then_and_no_longer() -> None:
    """An overdue appointment would wait for a tiding that does not come."""
    queue = ThreadQueue(seconds)
    assert queue.get(seconds() + 0.05) is None
    assert queue.get(-1.0) is None
    queue.put("item")
    assert queue.get(seconds() - 1) == "item"
