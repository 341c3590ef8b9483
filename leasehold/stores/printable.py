"""Text from outside made safe to show: what moves a cursor, hides, or breaks a line is shown as Python writes it.

Keys, owners and what a service answers may hold anything. Nothing of it reaches a screen, a log or a page but
through here.
"""

import logging

_FORMATTER = logging.Formatter()


def printable(text: str) -> str:
    """The text in one line, every character of it to be seen."""
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """Escape a text of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def escaped(log: logging.Logger) -> logging.Logger:
    """The logger, with every message made printable for all handlers."""
    log.addFilter(_escape)
    return log


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    if record.exc_info and not record.exc_text:
        # The standard formatters take it from here.
        record.exc_text = printable_lines(_FORMATTER.formatException(record.exc_info))
    return True
