"""Sets up the Python processes that Spark starts for a source, so that they log to the driver's log and end cleanly.

By itself, Spark configures no logging in these processes, does not end them cleanly, and reports their errors as if
they were its own. The source-runner process plans the batches of a query. Tasks run in processes on executors, where
this package may be missing.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.cloudpickle import dumps

from leasehold.adapters.consumer.runner import EXPLAINED_ERRORS
from leasehold.adapters.signals import replace_handler
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.spark"))

HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
"""The environment variable that Spark checks when an error has ended one of its Python processes. If it is "1", Spark
hides the traceback."""

SIGNALS = 64
"""The maximum number of signals to read at a time. Each signal is one byte."""


@contextmanager
def raise_plain_errors() -> Iterator[None]:
    """Make Spark report the errors that users can fix without a traceback.

    If such an error is raised, an environment variable of the process is changed. This does not affect later errors,
    because the error ends the process.
    """
    try:
        yield
    except (*EXPLAINED_ERRORS, ValueError):
        os.environ[HIDE_TRACEBACK] = "1"
        raise


def set_up_logging() -> None:
    """Log warnings and the events of the query's leases, so that they appear in the driver's log."""
    # Spark configures no logging in this process. If the user has configured logging, leave it unchanged.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log.logger.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def end_on_signal(stop: Callable[[], None]) -> None:
    """On SIGTERM (which Spark may send twice) or Ctrl-C, call `stop` and then end the process.

    `stop` is called in a separate thread. Spark closes its channel just before it sends the signal, so the main thread
    may already be releasing leases. If an exception were raised in the main thread, it could interrupt a release, or
    leave a lock held that other releases need.
    """
    signal_numbers = {
        number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN
    }
    reading_end, writing_end = socket.socketpair()
    writing_end.setblocking(False)  # `set_wakeup_fd` requires a nonblocking socket
    for number in signal_numbers:
        replace_handler(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)

    def end_process() -> None:
        with reading_end, writing_end:
            while signal_numbers.isdisjoint(reading_end.recv(SIGNALS)):
                pass
            try:
                stop()
            finally:
                os._exit(0)

    def on_failure(fault: BaseException) -> None:
        log.error("signals are not handled any more, so this process ends now: %s", error_summary(fault))
        os._exit(1)

    spawn("leasehold-end", end_process, on_failure)


def make_recreator(recreated_class: type, state: dict[str, Any]) -> Callable[[], object]:
    """Return a function that recreates an object of this class in another process.

    If the Python of the other process lacks a package, the function raises an ImportError that names the package and a
    remedy. The function is nested because Spark pickles nested functions by value, so that the other process need not
    import this module.
    """
    pickled_state = dumps((recreated_class, state))  # type: ignore[no-untyped-call]  # Spark's
    package_root = str(Path(__file__).parents[3])

    def recreate() -> object:
        import os  # noqa: PLC0415  the function cannot use this module's imports
        import pickle  # noqa: PLC0415  likewise
        import sys  # noqa: PLC0415  likewise

        # In the processes of a query's source and sink, Spark does not add the files from --py-files to Python's path.
        if os.path.isfile(package_root) and package_root not in sys.path:  # noqa: PTH113  the driver imported this package from a zip file
            sys.path.append(package_root)
        try:
            cls, state = pickle.loads(pickled_state)  # noqa: S301  Spark unpickles everything its processes receive anyway
        except ImportError as import_error:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise ImportError(
                f"{import_error}: the Python of Spark's tasks is {sys.executable}; set PYSPARK_PYTHON to one with "
                "'leasehold[spark]' on every machine, or ship such an environment with the query (spark.archives)"
            ) from None
        instance = cls.__new__(cls)
        instance.__dict__.update(state)
        return instance

    return recreate
