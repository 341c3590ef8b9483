"""What the process that Spark starts for a source needs of us: words in the driver's log, and an end in good order."""

import logging
import signal

log = logging.getLogger("leasehold.spark")


def speak() -> None:
    """Have warnings, and what befalls the query's part in its group, reach the driver's log."""
    # The runner process is Spark's and sets up no logging; where somebody did, that stands.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def end_on_signal() -> None:
    """Have the process stop its reader when Spark ends it, which is by a signal, sometimes twice."""

    def end(_number: int, _frame: object) -> None:
        # Before anything else: a second signal would interrupt the releasing.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
