"""Ends a command on failures and on signals.

After a failure, the command prints one line to standard error and exits with a status. After a signal, the command
cleans up, and no further signal interrupts the cleanup.
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from leasehold.adapters.cli.common.standard_streams import find_output_fault
from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.threads import SIGNAL_SECONDS
from leasehold.stores.printable import printable_lines


@contextmanager
def exit_on_failure(
    command: str, *failures: type[Exception], misuse: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Catch an error of the command, print it, and exit.

    The exit status is 2 for a `misuse` error or a missing optional dependency, and 1 for the other `failures`.
    """
    try:
        yield
    except (*misuse, *failures) as error:
        if isinstance(error, OSError) and find_output_fault() is not None:
            raise  # `run_and_check_output` reports failures of standard output
        print(printable_lines(f"leasehold {command}: {error}"), file=sys.stderr)
        is_misuse = isinstance(error, misuse) or isinstance(error.__cause__, ModuleNotFoundError)
        raise typer.Exit(2 if is_misuse else 1) from None


END_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class EndSignal(BaseException):
    """Raised when a signal that ends the command has arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Raise EndSignal in the main thread on the first signal, and ignore later signals until the context is left.

    A signal that the process already ignores, such as SIGHUP under nohup, stays ignored.
    """
    old_handlers = {
        signal_number: handler
        for signal_number in END_SIGNALS
        if (handler := signal.getsignal(signal_number)) != signal.SIG_IGN
    }

    def raise_end_signal(number: int, _frame: object) -> None:
        for signal_number in old_handlers:
            signal.signal(signal_number, signal.SIG_IGN)
        raise EndSignal(number)

    try:
        try:
            for signal_number in old_handlers:
                replace_handler(signal_number, raise_end_signal)
            yield
        finally:
            # Ignore signals first. Otherwise, a signal could interrupt the loop that restores the handlers.
            for signal_number in old_handlers:
                signal.signal(signal_number, signal.SIG_IGN)
    finally:
        for signal_number, handler in old_handlers.items():
            restore_handler(signal_number, handler)


def wait_for_signal() -> NoReturn:
    """Wait until a signal handler raises an exception, even if another thread received the signal."""
    while True:
        time.sleep(SIGNAL_SECONDS)
