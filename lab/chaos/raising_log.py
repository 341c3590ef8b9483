"""A logging handler and filter that raise exceptions for some lines while a control file requests it."""

import itertools
import logging
from pathlib import Path

ORDER = "log raises"
RAISED = (
    KeyError("x"),
    MemoryError(),
    RecursionError(),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"),
    OSError(28),
)


class RaisingLogHandler(logging.Handler):
    """A log handler and filter such as a user's program might install.

    Attributes:
        orders: The control file, which contains the current order.
    """

    def __init__(self, orders: Path) -> None:
        super().__init__()
        self.orders = orders
        self._lines, self._errors = itertools.count(), itertools.cycle(RAISED)

    def install(self) -> None:
        """Add the handler to the library's logger, and the filter to each logger of the library that exists."""
        logging.getLogger("leasehold").addHandler(self)
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.startswith("leasehold") and isinstance(logger, logging.Logger):
                logger.addFilter(self._filter)

    def remove(self) -> None:
        """Undo `install`."""
        logging.getLogger("leasehold").removeHandler(self)
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.removeFilter(self._filter)

    def handle(self, record: logging.LogRecord) -> bool:  # noqa: ARG002  the base class's signature
        """Raise an exception if the control file requests it."""
        self._raise_if_requested()
        return True

    def _filter(self, _record: logging.LogRecord) -> bool:
        if next(self._lines) % 2:
            self._raise_if_requested()
        return True

    def _raise_if_requested(self) -> None:
        if self.orders.read_text() == ORDER:
            raise next(self._errors)
