"""Ends a command on failure, with one line on standard error and an exit status, and on signals.

A signal to end makes a command clean up what it has set up, and nothing interrupts the cleanup.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from leasehold.adapters.cli.common.standard_streams import output_fault
from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.threads import SIGNAL_SECONDS
from leasehold.stores.printable import printable_lines


@contextmanager
def ending(
    command: str, *failures: type[Exception], misuse: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Exit with status 1 after one of these failures, or with 2 after bad usage or if an extra is missing."""
    try:
        yield
    except (*misuse, *failures) as error:
        if isinstance(error, OSError) and output_fault() is not None:
            raise  # the failure is in the output, not in the input
        print(printable_lines(f"leasehold {command}: {error}"), file=sys.stderr)
        final = isinstance(error, misuse) or isinstance(error.__cause__, ModuleNotFoundError)
        raise typer.Exit(2 if final else 1) from None


ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ended(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise Ended in the main thread on the first signal, and ignore later ones until the context is left.

    A signal that was ignored stays ignored, such as SIGHUP under nohup.
    """
    before = {each: handler for each in ENDING if (handler := signal.getsignal(each)) != signal.SIG_IGN}

    def end(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    try:
        try:
            for each in before:
                replace_handler(each, end)
            yield
        finally:
            # A signal that arrives while handlers are restored would interrupt this, and leave the others ignored.
            for each in before:
                signal.signal(each, signal.SIG_IGN)
    finally:
        for each, handler in before.items():
            restore_handler(each, handler)


def wait_for_the_end() -> NoReturn:
    """Wait until a signal handler raises, even if another thread received the signal."""
    while True:
        time.sleep(SIGNAL_SECONDS)
