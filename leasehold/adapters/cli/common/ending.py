"""The end of a command where something is wrong: one line on standard error, and its status.

A signal to end makes a command take down what it has set up, and nothing interrupts that.
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
    """End the command with status 1 after one of these failures, or 2 after bad usage or for a missing extra."""
    try:
        yield
    except (*misuse, *failures) as error:
        if isinstance(error, OSError) and output_fault() is not None:
            raise  # the input is not at fault
        print(printable_lines(f"leasehold {command}: {error}"), file=sys.stderr)
        final = isinstance(error, misuse) or isinstance(error.__cause__, ModuleNotFoundError)
        raise typer.Exit(2 if final else 1) from None


ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ended(BaseException):
    """The process was asked to end by this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def unwinding() -> Iterator[None]:
    """The first of the signals raises Ended where the main thread is; later ones are ignored until this is left.

    An ignored signal stays ignored: SIGHUP under nohup.
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
            # One that comes while handlers are put back would end this half-way, and leave the rest ignored for good.
            for each in before:
                signal.signal(each, signal.SIG_IGN)
    finally:
        for each, handler in before.items():
            restore_handler(each, handler)


def wait_for_the_end() -> NoReturn:
    """Wait until a signal raises, also where another thread has received it."""
    while True:
        time.sleep(SIGNAL_SECONDS)
