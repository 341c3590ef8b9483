"""Prepares the processes that Spark starts for a source: they log to the driver's log, and shut down cleanly.

Spark does neither, and reports any error in them as its own. Its source-runner process plans a query's batches. Tasks
run on executors, where this package may be missing.
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

from leasehold.adapters.consumer.runner import READABLE
from leasehold.adapters.signals import replace_handler
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.spark"))

HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"
"""Spark's own variable, which it checks when an error has ended one of its Python processes."""

SIGNALS = 64
"""How many signals to read at a time, one byte each."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Make Spark report an error that explains itself to users as one sentence, without tracebacks.

    The error ends the process, so the setting affects nothing later.
    """
    try:
        yield
    except (*READABLE, ValueError):
        os.environ[HIDE_TRACEBACK] = "1"
        raise


def set_up_logging() -> None:
    """Send warnings, and the events of the query's leases, to the driver's log."""
    # Spark sets up no logging in this process. If the user did, leave it as it is.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log.logger.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def end_on_signal(stop: Callable[[], None]) -> None:
    """On SIGTERM, which Spark may send twice, or Ctrl-C, call `stop` and then end the process.

    `stop` is called in a thread of its own. An exception in the main thread could interrupt releases, which begin when
    Spark closes its channel just before it sends the signal, or could leave a lock held that they need.
    """
    ends = {number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN}
    reading_end, writing_end = socket.socketpair()
    writing_end.setblocking(False)  # `set_wakeup_fd` requires this
    for number in ends:
        replace_handler(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)

    def end() -> None:
        with reading_end, writing_end:
            while ends.isdisjoint(reading_end.recv(SIGNALS)):
                pass
            try:
                stop()
            finally:
                os._exit(0)

    def failed(fault: BaseException) -> None:
        log.error("signals are not handled any more, so this process ends now: %s", said(fault))
        os._exit(1)

    spawn("leasehold-end", end, failed)


def recreator(kind: type, state: dict[str, Any]) -> Callable[[], object]:
    """Return a function that recreates this object in another process, or reports which package its Python lacks.

    Spark pickles a nested function by value, so the other process need not import it by name.
    """
    packed = dumps((kind, state))  # type: ignore[no-untyped-call]  # Spark's
    home = str(Path(__file__).parents[3])

    def unpacked() -> object:
        import os  # noqa: PLC0415  the function cannot use imports of this module
        import pickle  # noqa: PLC0415  likewise
        import sys  # noqa: PLC0415  likewise

        # For a query's source and sink, Spark looks for files from --py-files in a folder that is always empty.
        if os.path.isfile(home) and home not in sys.path:  # noqa: PTH113  the driver's zip file, like Spark's own
            sys.path.append(home)
        try:
            cls, state = pickle.loads(packed)  # noqa: S301  Spark's own processes unpickle everything they get
        except ImportError as missing:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise ImportError(
                f"{missing}: the Python of Spark's tasks is {sys.executable}; set PYSPARK_PYTHON to one with "
                "'leasehold[spark]' on every machine, or ship such an environment with the query (spark.archives)"
            ) from None
        instance = cls.__new__(cls)
        instance.__dict__.update(state)
        return instance

    return unpacked
