"""Tests that logging never raises, even if the program's own handlers and filters do."""

import ast
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import leasehold
from leasehold.stores.printable import SafeLog, make_safe_logger

RAISED = (
    KeyError("x"),
    MemoryError(),
    RecursionError(),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"),
    OSError(28),
)
ROOT = Path(leasehold.__file__).parent


class RaisingHandler(logging.Handler):
    """A log handler that raises an exception for each record."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def handle(self, record: logging.LogRecord) -> bool:  # noqa: ARG002  whatever it is
        raise self.error


@pytest.fixture
def log() -> Iterator[SafeLog]:
    """Return a new logger."""
    logger = make_safe_logger(logging.getLogger("leasehold.test_safe_logs"))
    yield logger
    logger.logger.handlers.clear()
    logger.logger.filters.clear()


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["handler", "filter"])
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "exception", "critical"])
def test_log_call_returns_even_if_a_handler_or_filter_raises(
    log: SafeLog, error: Exception, where: str, level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a handler or a filter raises, the line is written to standard error instead."""
    log.setLevel(logging.DEBUG)
    if where == "handler":
        log.logger.addHandler(RaisingHandler(error))
    else:
        log.logger.addFilter(RaisingHandler(error).handle)
    getattr(log, level)("lease %s is %s", "s-0", "lost")
    assert "leasehold.test_safe_logs: lease s-0 is lost (a log handler raised " in capsys.readouterr().err


def test_log_call_returns_without_standard_error(log: SafeLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon may have closed its standard error, so the fallback may not be available."""
    log.logger.addHandler(RaisingHandler(OSError(28)))
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("lost")


def test_log_line_names_its_calling_function_and_keeps_extra_fields(
    log: SafeLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.warning("lost %d", 1, extra={"lease": "s-0"})
    (record,) = caplog.records
    assert (record.funcName, record.getMessage(), record.__dict__["lease"]) == (
        "test_log_line_names_its_calling_function_and_keeps_extra_fields",
        "lost 1",
        "s-0",
    )


LOGGING_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})

UNSAFE_LOGGERS = (
    "getLogger('a').warning('x')",
    "log = getLogger('a')\nlog.warning('x')",
    "log: Logger = getLogger('a')\nlog.warning('x')",
    "log, level = getLogger('a'), 3\nlog.warning('x')",
    "(log := getLogger('a')).warning('x')",
    "self._log = logging.getLogger('a')\nself._log.exception('x')",
    "class A:\n    log: Logger = getLogger('a')\n    def f(self):\n        self.log.warning('x')",
    "def f(log=getLogger('a')):\n    log.warning('x')",
    "def f(*, log=getLogger('a')):\n    log.warning('x')",
    "self.log = log = getLogger('a') if one else getLogger('b')\nlog.info('x')",
    "logging.warning('x')",
)
"""Programs that log once through a logger that may raise."""


@pytest.mark.parametrize("source", UNSAFE_LOGGERS)
def test_unsafe_logger_is_found_wherever_it_is_stored(source: str) -> None:
    """A logger may be stored in a variable, an attribute, a default, or one of several targets."""
    assert len(_unsafe_calls(ast.parse(source))) == 1


@pytest.mark.parametrize("source", UNSAFE_LOGGERS[:-1])
def test_safe_logger_may_be_stored_anywhere(source: str) -> None:
    """`make_safe_logger` makes a logger safe."""
    assert _unsafe_calls(ast.parse(re.sub(r"((?:logging\.)?getLogger\('\w'\))", r"escaped(\1)", source))) == []


def test_every_logger_that_logs_is_safe() -> None:
    """A module that calls `logging.getLogger` in order to log wraps the logger in `make_safe_logger`."""
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    assert [f"{path.relative_to(ROOT)}:{line}" for path, tree in modules.items() for line in _unsafe_calls(tree)] == []


def _unsafe_calls(tree: ast.AST) -> list[int]:
    """Return the numbers of lines that log through a logger that `make_safe_logger` has not wrapped."""
    nodes = [*ast.walk(tree)]
    names = {_stored_name(target) for node in nodes for target, value in _assigned(node) if _is_bare(value)} - {None}
    calls = [(node, node.func) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call.lineno
        for call, function in calls
        if function.attr in LOGGING_CALLS
        and (_is_bare(function.value) or _stored_name(function.value) in names | {"logging"})
    ]


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr | None]]:
    """Yield each assignment target and each parameter with a default, together with its value."""
    match node:
        case ast.Assign(targets, value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from zip(target.elts, value.elts, strict=False)
                else:
                    yield target, value
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.arguments(posonlyargs, args, _, kwonlyargs, kw_defaults, _, defaults):
            yield from zip(reversed([*posonlyargs, *args]), reversed(defaults), strict=False)
            yield from zip(kwonlyargs, kw_defaults, strict=True)
        case _:
            pass


def _stored_name(target: ast.AST) -> str | None:
    """Return the name of a variable or parameter, or of an attribute of any object."""
    match target:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name):
            return name
        case _:
            return None


def _is_bare(value: ast.AST | None) -> bool:
    """Return whether this expression may be a logger that raises."""
    match value:
        case ast.Call(ast.Name("getLogger") | ast.Attribute(attr="getLogger")):
            return True
        case ast.IfExp(body=one, orelse=other):
            return _is_bare(one) or _is_bare(other)
        case ast.BoolOp(values=values):
            return any(map(_is_bare, values))
        case ast.NamedExpr(value=named):
            return _is_bare(named)
        case _:
            return False


RECOVERING = ("adapters/worker", "adapters/consumer", "adapters/sources", "adapters/multilang", "stores")
"""The folders with the code that holds, reads and writes leases."""

REPORTING_CALLS = LOGGING_CALLS | {"notify", "unforeseen"}

REPORTS_BEFORE_RECOVERY = (
    "log.warning('x')\nself.due = 1",
    "log.warning('x')\nreturn self.stop()",
    "if one:\n    log.warning('x')\nself.due = 1",
    "notify('observer')\nself.due = 1",
    "self._log.error('x')\nself.due += 1\nraise",
)


@pytest.mark.parametrize("body", REPORTS_BEFORE_RECOVERY)
def test_logging_before_recovery_is_found(body: str) -> None:
    """The recovery after a log line may be a call or an assignment, also in an outer block."""
    tree = ast.parse("try:\n    f()\nexcept Exception:\n" + "\n".join("    " + line for line in body.split("\n")))
    assert len(_reports_before_recovery(tree)) == 1


def test_except_clause_recovers_before_it_logs() -> None:
    """The recovery comes first, because a log handler or an observer may hang or end the thread."""
    assert [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in RECOVERING
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in _reports_before_recovery(ast.parse(path.read_text(encoding="utf-8")))
    ] == []


def _reports_before_recovery(tree: ast.AST) -> list[int]:
    """Return the numbers of lines in `except` clauses that log or notify before more is done than leaving."""
    clauses = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [line for clause in clauses for line in _early_reports(clause.body, followed=False)]


def _early_reports(body: list[ast.stmt], *, followed: bool) -> Iterator[int]:
    for index, statement in enumerate(body):
        later_statements = body[index + 1 :]
        leaving_statement = next(
            (
                later_statement
                for later_statement in later_statements
                if isinstance(later_statement, ast.Return | ast.Raise | ast.Continue)
            ),
            None,
        )
        acts = not all(map(_only_leaves, later_statements)) or (followed and leaving_statement is None)
        if _reports(statement) and acts:
            yield statement.lineno
        for field in ("body", "orelse", "finalbody"):
            yield from _early_reports(getattr(statement, field, []), followed=acts)
        for case in getattr(statement, "cases", []):
            yield from _early_reports(case.body, followed=acts)


def _reports(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    function = statement.value.func
    return getattr(function, "attr", None) in REPORTING_CALLS or getattr(function, "id", None) in REPORTING_CALLS


def _only_leaves(statement: ast.stmt) -> bool:
    """Return whether the statement changes nothing: it only logs, or leaves the clause with existing values."""
    match statement:
        case ast.Return(value):
            return value is None or not any(isinstance(node, ast.Call) for node in ast.walk(value))
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Pass():
            return True
        case _:
            return _reports(statement)
