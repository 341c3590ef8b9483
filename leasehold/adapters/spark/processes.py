"""Prepares the processes that Spark starts for a source: they log to the driver's log, and end in good order.

Spark sets up neither, and takes any fault of theirs for one of its own. Its source-runner process plans a query's
batches; tasks and readers run on executors, where this package may be missing.
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

HIDING = "SPARK_HIDE_TRACEBACK"
"""Spark's own variable, looked at when a fault has ended one of its Python processes."""

SIGNALS = 64
"""How many signals are read at a time, a byte for each."""


@contextmanager
def told_plainly() -> Iterator[None]:
    """Have Spark tell of a fault that tells a user its cause in that one sentence, without tracebacks.

    The process ends with the fault, so that the setting outlives nothing.
    """
    try:
        yield
    except (*READABLE, ValueError):
        os.environ[HIDING] = "1"
        raise


def speak() -> None:
    """Send warnings, and the events of the query's leases, to the driver's log."""
    # Spark sets up no logging in this process; if the user did, it is left as it is.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log.logger.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def end_on_signal(stop: Callable[[], None]) -> None:
    """End the process once `stop` has returned, when Spark sends SIGTERM, sometimes twice, or Ctrl-C reaches it.

    `stop` is called in a thread of its own. An exception in the main thread could cut off releases, which begin when
    Spark closes its channel, just before it sends the signal; or leave a lock held that they need.
    """
    ends = {each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN}
    hears, tells = socket.socketpair()
    tells.setblocking(False)  # else it cannot be written to while a signal is taken
    for each in ends:
        replace_handler(each, lambda _number, _frame: None)
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)

    def end() -> None:
        with hears, tells:
            while ends.isdisjoint(hears.recv(SIGNALS)):
                pass
            try:
                stop()
            finally:
                os._exit(0)

    def failed(fault: BaseException) -> None:
        log.error("no signal would end this process any more, so it ends now: %s", said(fault))
        os._exit(1)

    spawn("leasehold-end", end, failed)


def unpacking(kind: type, state: dict[str, Any]) -> Callable[[], object]:
    """Make the function that gives another process this object, or tells which package its Python lacks.

    Spark pickles what is made within a function whole, and not by a name that would have to be imported.
    """
    packed = dumps((kind, state))  # type: ignore[no-untyped-call]  # Spark's
    home = str(Path(__file__).parents[3])

    def unpacked() -> object:
        import os  # noqa: PLC0415  nothing of this module is there yet
        import pickle  # noqa: PLC0415  likewise
        import sys  # noqa: PLC0415  likewise

        # Of a query's source and sink Spark looks for what --py-files has shipped in a folder that nobody fills.
        if os.path.isfile(home) and home not in sys.path:  # noqa: PTH113  a zip of the driver's machine, as Spark's own
            sys.path.append(home)
        try:
            found, state = pickle.loads(packed)  # noqa: S301  by Spark's own processes, as all they get
        except ImportError as missing:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise ImportError(
                f"{missing}: the Python of Spark's tasks is {sys.executable}; set PYSPARK_PYTHON to one with "
                "'leasehold[spark]' on every machine, or ship such an environment with the query (spark.archives)"
            ) from None
        made = found.__new__(found)
        made.__dict__.update(state)
        return made

    return unpacked
