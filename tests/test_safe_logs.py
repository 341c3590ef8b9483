"""Logging never raises: handlers and filters of the program may, and what logs a fault must go on all the same."""

import ast
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import leasehold
from leasehold.stores.printable import SafeLog, escaped

RAISED = (
    KeyError("x"),
    MemoryError(),
    RecursionError(),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"),
    OSError(28),
)
ROOT = Path(leasehold.__file__).parent


class Raising(logging.Handler):
    """A handler that raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def handle(self, record: logging.LogRecord) -> bool:  # noqa: ARG002  whatever it is
        raise self.error


@pytest.fixture
def log() -> Iterator[SafeLog]:
    """A logger of its own."""
    found = escaped(logging.getLogger("leasehold.test_safe_logs"))
    yield found
    found.logger.handlers.clear()
    found.logger.filters.clear()


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["handler", "filter"])
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "exception", "critical"])
def test_a_log_call_returns_whatever_a_handler_or_a_filter_raises(
    log: SafeLog, error: Exception, where: str, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line goes to standard error instead."""
    log.setLevel(logging.DEBUG)
    if where == "handler":
        log.logger.addHandler(Raising(error))
    else:
        log.logger.addFilter(Raising(error).handle)
    getattr(log, level)("lease %s is %s", "s-0", "lost")
    assert "leasehold.test_safe_logs: lease s-0 is lost (a handler of the log raised " in capsys.readouterr().err


def test_a_log_call_returns_without_a_standard_error(log: SafeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon may have closed it."""
    log.logger.addHandler(Raising(OSError(28)))
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("lost")


def test_a_line_names_the_function_that_logged_it_and_keeps_its_extra_fields(
    log: SafeLog, caplog: pytest.LogCaptureFixture
) -> None:
    """The adapter in between is not the place that a reader looks for."""
    log.warning("lost %d", 1, extra={"lease": "s-0"})
    (record,) = caplog.records
    assert (record.funcName, record.getMessage(), record.__dict__["lease"]) == (
        "test_a_line_names_the_function_that_logged_it_and_keeps_its_extra_fields",
        "lost 1",
        "s-0",
    )


def test_every_logger_that_logs_is_a_safe_one() -> None:
    """A module that calls `logging.getLogger` to log, and not to set a level or handlers, wraps it in `escaped`."""
    logging_calls = {"debug", "info", "warning", "error", "exception", "critical", "log"}
    bare = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        safe = {id(call.args[0]) for call in ast.walk(tree) if _calls(call, "escaped")}  # type: ignore[attr-defined]
        loggers = {id(each) for each in ast.walk(tree) if _calls(each, "getLogger")} - safe
        names = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and id(node.value) in loggers
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in logging_calls:
                on = node.func.value
                if id(on) in loggers or (isinstance(on, ast.Name) and on.id in names | {"logging"}):
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert bare == []


def _calls(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.Call) or not node.args:
        return False
    function = node.func
    return getattr(function, "id", None) == name or getattr(function, "attr", None) == name
