"""Makes untrusted text safe to show. Control characters, invisible characters and line breaks become Python escapes.

Lease keys, names of owners and responses of services may contain any characters, so they are escaped before they are
written to a terminal, a log or a page.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

TEXT_LENGTH_MAX = 2000
"""The maximum length of an error message, in characters. A limit is needed because an exception's message might contain
a whole batch."""

_FORMATTER = logging.Formatter()


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a suggestion to append to the error message for an unknown word, or "" if no choice is similar."""
    similar_words = get_close_matches(word, list(choices), 1)
    return f"; did you mean {similar_words[0]!r}?" if similar_words else ""


def join_limited(strings: Sequence[str], limit: int = 5, separator: str = ", ") -> str:
    """Join the first `limit` strings and append the number of the others, to keep messages about many shards short."""
    omitted = f" and {len(strings) - limit} more" if len(strings) > limit else ""
    return separator.join(strings[:limit]) + omitted


def printable(text: str) -> str:
    """Return the text as one line, with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def printable_lines(text: str) -> str:
    """Escape unprintable characters except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def limited_error_text(error: BaseException, limit: int = TEXT_LENGTH_MAX) -> str:
    """Return the message of an exception, truncated to `limit` characters. Never raises.

    A user's exception class may have a `__str__` that raises, recurses forever, or does not return a string.
    """
    try:
        return str.__getitem__(str(error), slice(limit))
    except BaseException as fault:  # noqa: BLE001  a report of an error must not raise another error
        return f"(its message cannot be read: {type(fault).__name__})"


def error_summary(error: BaseException) -> str:
    """Return the class and the message of an exception as one line of limited length. Never raises."""
    message = limited_error_text(error)
    return printable(f"{type(error).__name__}: {message}" if message else type(error).__name__)


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class SafeLog(_Adapter):
    """A logger that never raises, even if the program's handlers or filters do, so that logging cannot end a thread.

    If a message cannot be logged, it is written to standard error together with the reason.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401  as in logging
        """Log as `logging.Logger.log` does, but never raise."""
        # Make `logging` skip this frame when it looks for the caller.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            self.logger.log(level, msg, *args, **kwargs)
        except Exception as fault:  # noqa: BLE001  a user's handler may raise any exception
            with suppress(Exception):  # standard error may be missing, closed, or full
                line = f"{self.logger.name}: {printable(str(msg) % args if args else str(msg))}"
                sys.stderr.write(f"{line} (a log handler raised {error_summary(fault)})\n")


def make_safe_logger(log: logging.Logger) -> SafeLog:
    """Return a logger that never raises, and whose messages are made printable before any handler sees them."""
    log.addFilter(_escape)
    return SafeLog(log, {})


def _escape(record: logging.LogRecord) -> bool:
    # Catch every exception, because the filter runs in the thread that logs the message. Otherwise, a value that cannot
    # be formatted would end that thread.
    try:
        if isinstance(record.args, tuple):
            record.args = tuple(
                limited_error_text(arg) if isinstance(arg, BaseException) else arg for arg in record.args
            )
        record.msg, record.args = printable(record.getMessage()), ()
    except BaseException as fault:  # noqa: BLE001  likewise
        record.msg, record.args = (
            f"{printable(str(record.msg))} (one of its values cannot be shown: {error_summary(fault)})",
            (),
        )
    if record.exc_info and not record.exc_text:
        try:
            # The standard formatters use exc_text if it is set.
            record.exc_text = printable_lines(_FORMATTER.formatException(record.exc_info))
        except BaseException as fault:  # noqa: BLE001  likewise
            record.exc_text = f"the trace cannot be shown: {error_summary(fault)}"
    return True
