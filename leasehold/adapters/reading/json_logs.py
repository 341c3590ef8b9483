"""Log lines as JSON objects, one a line, for whoever collects them."""

import json
import logging
from datetime import UTC, datetime

FIELDS = ("lease", "rule", "outcome")
"""The fields of a line beside its message: the lease, the rule that asked, and the store's outcome."""


class JsonLines(logging.Formatter):
    """Formats records as JSON: at, level, logger, worker, message, and those of FIELDS that a line has."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Write the message as a single line, also where it holds several."""
        told = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
        }
        told |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info or record.exc_text:
            told["trace"] = record.exc_text or self.formatException(record.exc_info or (None, None, None))
        return json.dumps(told, default=str)
