"""Runs a `Runner` in a thread of its own, or in the test's thread with a time limit."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, Timer

from leasehold.adapters.consumer.runner import Runner

WAIT = 30.0


@contextmanager
def running(runner: Runner) -> Iterator[Thread]:
    """Run the runner in a thread during the block, and then stop it, so that a failed test leaves no worker behind."""
    thread = Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        runner.stop()
        thread.join(WAIT)
    assert not thread.is_alive()


def run_to_its_end(runner: Runner) -> None:
    """Run the runner here until it ends by itself. Stop it after a time limit, so that the test fails in that case."""
    stop_timer = Timer(WAIT, runner.stop)
    stop_timer.start()
    try:
        runner.run()
    finally:
        stop_timer.cancel()
