"""Text from outside made safe to show: what moves a cursor, hides, or breaks a line is shown as Python writes it.

Keys, owners and what a service answers may hold anything. Nothing of it reaches a screen, a log or a page but
through here.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

SAID_MOST = 2000
"""Characters of an error's text that are said: it may hold a whole batch."""

_FORMATTER = logging.Formatter()


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence about a word that is none of these: the one that was meant, if one is close."""
    close = get_close_matches(word, list(choices), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def few(texts: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """The first of these texts, and how many more there are: a line that named a thousand shards would have 24 KB."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def printable(text: str) -> str:
    """The text in one line, every character of it to be seen."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def printable_lines(text: str) -> str:
    """Escape a text of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def text_of(error: BaseException, most: int = SAID_MOST) -> str:
    """The text of an exception, cut after so many characters. It never raises.

    The class may be a user's: its `__str__` may raise whatever it likes, recur for ever, or answer what is no text.
    """
    try:
        return str.__getitem__(str(error), slice(most))
    except BaseException as fault:  # noqa: BLE001  what only tells of a fault must not be one
        return f"(its text cannot be had: {type(fault).__name__})"


def said(error: BaseException) -> str:
    """The class and the text of an exception, in one bounded line. It never raises."""
    text = text_of(error)
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class SafeLog(_Adapter):
    """A logger that never raises: a program's handlers and filters may, and a thread that logs must go on.

    A line that could not be logged goes to standard error, with the reason.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401  as logging's
        """Log as `logging.Logger.log` does, whatever handlers and filters raise."""
        # One frame further than the caller of `warning` and the like, which logging leaves out by itself.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        try:
            self.logger.log(level, msg, *args, **kwargs)
        except Exception as fault:  # noqa: BLE001  whatever a user's handler raises
            with suppress(Exception):  # standard error may be missing, closed, or full
                line = f"{self.logger.name}: {printable(str(msg) % args if args else str(msg))}"
                sys.stderr.write(f"{line} (a handler of the log raised {said(fault)})\n")


def escaped(log: logging.Logger) -> SafeLog:
    """The logger, which never raises, with every message made printable for all handlers."""
    log.addFilter(_escape)
    return SafeLog(log, {})


def _escape(record: logging.LogRecord) -> bool:
    # Called within the caller's own call: a value that cannot be shown must cost the line, and not the thread.
    try:
        if isinstance(record.args, tuple):
            record.args = tuple(text_of(each) if isinstance(each, BaseException) else each for each in record.args)
        record.msg, record.args = printable(record.getMessage()), ()
    except BaseException as fault:  # noqa: BLE001  likewise
        record.msg, record.args = f"{printable(str(record.msg))} (a value of it cannot be shown: {said(fault)})", ()
    if record.exc_info and not record.exc_text:
        try:
            # The standard formatters take it from here.
            record.exc_text = printable_lines(_FORMATTER.formatException(record.exc_info))
        except BaseException as fault:  # noqa: BLE001  likewise
            record.exc_text = f"the trace cannot be shown: {said(fault)}"
    return True
