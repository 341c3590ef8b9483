"""A runner in a thread of its own, for as long as a test needs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread, Timer

from leasehold.adapters.consumer.runner import Runner

WAIT = 30.0


@contextmanager
def running(runner: Runner) -> Iterator[Thread]:
    """Run it during the block, and wait for its end; a failed test leaves no worker behind."""
    thread = Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        runner.stop()
        thread.join(WAIT)
    assert not thread.is_alive()


def run_to_its_end(runner: Runner) -> None:
    """Run it here until it ends by itself. If it does not, stop it, so that its test fails instead of hanging."""
    late = Timer(WAIT, runner.stop)
    late.start()
    try:
        runner.run()
    finally:
        late.cancel()
