"""Plants faults of kinds that mutmut does not have, one at a time, and reports by room those that no test notices.

    python lab/mutation/statements.py                 all rooms of statements.toml
    python lab/mutation/statements.py worker          one room, or one module by the end of its path
    python lab/mutation/statements.py --anew          include what was tried before
    python lab/mutation/statements.py --seconds 150   time limit per module; the next run continues there

Two statements are swapped, a guard continues instead of returning, a reset is left out, or a `finally` does nothing. A
module and its tests are imported once. Each fault is planted into a fork of that process, where it replaces the code of
the function. No file changes, so a child process of a test runs the code without the fault. The tests that run the line
are executed until the first one fails. Results are kept under build/statements. The next run tries a fault again only
if its function has changed or, if no test noticed it, if the tests have changed. Faults that cannot be distinguished
from the original are listed in unseen.toml with the reason, and do not count.
"""

# ruff: noqa: T201  a script prints its findings

import argparse
import ast
import gc
import json
import math
import os
import signal
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from hashlib import sha256
from inspect import CO_OPTIMIZED
from io import StringIO
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from attrs import frozen
from hypothesis import Phase, settings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "statements"
AT_ONCE = 8
"""The number of faults to test at the same time.

The number may exceed that of the cores, because tests with a fault mostly wait for something that never happens.
"""
TEST_SECONDS = 60.0
"""The time limit of one test in seconds, in place of the 300 s of `make test`.

If a fault makes a test hang, the test fails only at this limit.
"""
SECONDS = 240.0
TIMEOUT_FACTOR = 5.0
"""Tests are stopped after `SECONDS`, or after this factor times their time without a fault if that is longer.

A stopped test does not count as having noticed the fault.
"""

RESET_METHODS = frozenset({"clear", "discard", "remove", "pop", "popleft", "cancel", "set", "close", "rest"})
"""Methods that reset or end something."""

ARGUMENTS = (
    *("-x", "-q", "--noconftest", "-p", "no:leasehold", "--hypothesis-profile", "faults", "-p", "no:cacheprovider"),
    *("-p", "no:unraisableexception", "-p", "no:threadexception", "-o", "pythonpath=tests", "-o", "addopts="),
    *(
        "-o",
        f"timeout={TEST_SECONDS}",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ),  # The modules are imported before pytest could rewrite them.
)
FAST, SLOW = "not (more or services or spark or slow)", "not (more or services or spark)"
SLOW_TEST_PREFIX = "slow:"
"""The prefix of tests that run only for faults that the other tests do not notice."""
FINE = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
"""The exit statuses of pytest that mean that no test failed. There may have been no test to run."""


@frozen
class Fault:
    """A change of a few lines, with its kind, the first changed line, and the source of the changed module."""

    kind: str
    line: int
    source: str


def list_faults(source: str) -> Iterator[Fault]:
    """Return every fault that can be planted into this module."""
    for node in ast.walk(ast.parse(source)):
        is_block = not isinstance(node, ast.Module | ast.ClassDef)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if is_block and isinstance(block, list):
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    continue  # there is nothing to restore, and the order seldom matters
                yield from _list_swaps(source, block)
                yield from (
                    _drop_statements(source, "reset", statement, statement)
                    for statement in block
                    if _is_reset(statement)
                )
        if (
            isinstance(node, ast.If)
            and not node.orelse
            and isinstance(last_statement := node.body[-1], _EXIT_STATEMENTS)
        ):
            yield _drop_statements(source, "guard", last_statement, last_statement)
        if isinstance(node, ast.Try) and node.finalbody:
            yield _drop_statements(source, "finally", node.finalbody[0], node.finalbody[-1])


_EXIT_STATEMENTS = ast.Return | ast.Continue | ast.Break | ast.Raise


def _list_swaps(source: str, block: list[ast.stmt]) -> Iterator[Fault]:
    """Yield a swap for each pair of adjacent statements that both have an effect.

    At least one of the two must be only a call, and the second must not use names that the first one binds.
    """
    for first_statement, second_statement in pairwise(block):
        has_call = isinstance(first_statement, ast.Expr) or isinstance(second_statement, ast.Expr)
        are_independent = (
            _only_records(first_statement)
            and _only_records(second_statement)
            and not _order_matters(first_statement, second_statement)
        )
        if (
            _has_effect(first_statement)
            and _has_effect(second_statement)
            and has_call
            and not are_independent
            and not (_find_names_bound(first_statement) & _find_names_read(second_statement))
        ):
            source_lines = source.splitlines(keepends=True)
            first_lines, second_lines = (
                source_lines[first_statement.lineno - 1 : first_statement.end_lineno],
                source_lines[second_statement.lineno - 1 : second_statement.end_lineno],
            )
            source_between = source_lines[first_statement.end_lineno or 0 : second_statement.lineno - 1]
            source_lines[first_statement.lineno - 1 : second_statement.end_lineno] = [
                *second_lines,
                *source_between,
                *first_lines,
            ]
            yield Fault("swap", first_statement.lineno, "".join(source_lines))


def _has_effect(statement: ast.stmt) -> bool:
    """Return whether the statement is an assignment, or a call that does not write to the log."""
    if isinstance(statement, ast.Assign | ast.AugAssign):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and not ast.unparse(call.func).startswith("log.")


MARKS = frozenset({"add", "append", "clear", "discard", "extend", "notify_all"})
PURE = frozenset({"int", "len", "list", "max", "min", "range", "sum", "tuple"})


def _only_records(statement: ast.stmt) -> bool:
    """Return whether the statement only records something.

    Such a statement cannot fail, and nothing reacts to it immediately.
    """
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, ast.Expr):
        calls = [node for node in calls if not (isinstance(node.func, ast.Attribute) and node.func.attr in MARKS)]
    return all(isinstance(node.func, ast.Name) and node.func.id in PURE for node in calls)


def _order_matters(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether one statement changes something that the other reads or changes, so that their order matters."""
    return bool(
        _find_targets_changed(first) & _find_names_used(second)
        or _find_targets_changed(second) & _find_names_used(first)
    )


def _find_targets_changed(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        func = statement.value.func
        return {ast.unparse(func.value)} if isinstance(func, ast.Attribute) else set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return {
        ast.unparse(element.value if isinstance(element, ast.Subscript) else element)
        for target in targets
        for element in (target.elts if isinstance(target, ast.Tuple) else [target])
    }


def _find_names_used(statement: ast.stmt) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute)}


def _find_names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _find_names_bound(statement: ast.stmt) -> set[str]:
    return _find_names(statement, ast.Store)


def _find_names_read(statement: ast.stmt) -> set[str]:
    return _find_names(statement, ast.Load)


def _is_reset(statement: ast.stmt) -> bool:
    """Return whether the statement resets something.

    It may assign a constant or an empty value, delete something, or call one of the methods in `RESET_METHODS`.
    """
    if isinstance(statement, ast.Assign):
        value = statement.value
        is_empty = isinstance(value, ast.Constant) or (isinstance(value, ast.Tuple | ast.List) and not value.elts)
        return is_empty and isinstance(statement.targets[0], ast.Attribute | ast.Subscript)
    if not (isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call)):
        return isinstance(statement, ast.Delete)
    return isinstance(call.func, ast.Attribute) and call.func.attr in RESET_METHODS


def _drop_statements(source: str, kind: str, first: ast.stmt, last: ast.stmt) -> Fault:
    lines = source.splitlines(keepends=True)
    if first is last and not hasattr(first, "body"):  # The names remain, so closures still find their variables.
        lines[first.lineno - 1] = f"{' ' * first.col_offset}if 0: {lines[first.lineno - 1].lstrip()}"
    else:
        lines[first.lineno - 1 : last.end_lineno] = [f"{' ' * first.col_offset}pass\n"]
    return Fault(kind, first.lineno, "".join(lines))


class LineTracer:
    """A pytest plugin that records which tests run which lines of a module, in any thread of its process."""

    def __init__(self, module: Path) -> None:
        self._module, self._run_tests = str(module), ""
        self.tests = defaultdict[int, set[str]](set)
        self.seconds = defaultdict[str, float](float)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Attribute the lines that run from now on to this test."""
        self._run_tests = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def trace(self, frame: FrameType, _event: str, _argument: object, /) -> Any:  # noqa: ANN401  as typeshed has it
        """Record a line. Frames of other modules are not traced."""
        if frame.f_code.co_filename != self._module:
            return None
        self.tests[frame.f_lineno].add(self._run_tests)
        return self.trace

    def run(self, arguments: list[str]) -> int:
        """Run pytest, and return its status."""
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        status = int(pytest.main(arguments, plugins=[self]))
        sys.settrace(None)
        return status

    def as_json(self) -> str:
        """Return, as JSON, the tests that run each line, the quickest first, and the time that all of them took."""
        tests_by_line = {line: sorted(tests - {""}, key=self.seconds.__getitem__) for line, tests in self.tests.items()}
        return json.dumps((tests_by_line, sum(self.seconds.values())))


def find_tests_by_line(module: str, tests: list[str]) -> tuple[dict[int, list[str]], float]:
    """Return the fast tests that run each line of this module, the quickest first, and the time that all of them take.

    Exits if one of the tests fails.
    """
    digest = sha256(
        "\n".join([(ROOT / module).read_text(encoding="utf-8"), *map(_read_test_text, tests)]).encode()
    ).hexdigest()
    cache_file, plugin = BUILD / f"{digest}.json", LineTracer(ROOT / module)

    def run(arguments: list[str]) -> int:
        status = plugin.run(arguments)
        if not status:
            cache_file.write_text(plugin.as_json(), encoding="utf-8")
        return status

    fast_tests = [test for test in tests if not test.startswith(SLOW_TEST_PREFIX)]
    if not cache_file.exists():
        forked_run = ForkedRun(
            partial(run, [*ARGUMENTS, "-o", f"timeout={TIMEOUT_FACTOR * SECONDS}", "-m", FAST, *fast_tests]),
            TIMEOUT_FACTOR * SECONDS,
        )
        while forked_run.result() is None:
            time.sleep(0.05)
        if not cache_file.exists():
            sys.exit(f"{module}: its tests fail, or take too long, without any fault")
    tests_by_line, total_seconds = json.loads(cache_file.read_text(encoding="utf-8"))
    return {int(line): test_names for line, test_names in tests_by_line.items()}, total_seconds


class ForkedRun:
    """A fork of this process that calls `run`. `result` returns its result once it has ended."""

    def __init__(self, run: Callable[[], int], limit: float) -> None:
        self._until = time.monotonic() + limit
        self._child = os.fork()
        if not self._child:
            os.setpgid(0, 0)
            null_device = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(null_device, stream)
            try:
                os._exit(run())
            finally:
                os._exit(pytest.ExitCode.INTERNAL_ERROR)

    def result(self) -> bool | None:
        """Return whether a test failed, or None while the tests are running.

        Tests that had to be stopped count as not having noticed the fault.
        """
        finished_pid, status = os.waitpid(self._child, os.WNOHANG)
        if finished_pid:
            return os.waitstatus_to_exitcode(status) == pytest.ExitCode.TESTS_FAILED  # any other status proves nothing
        if time.monotonic() < self._until:
            return None
        os.killpg(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        return False


def run_with_fault(module: str, fault: Fault, tests: list[str], fast_tests: list[str]) -> int:
    """Plant the fault, run the fast tests of its line and then the slow ones, and return the exit status of pytest."""
    plant_fault(module, fault)
    slow_tests = [test.removeprefix(SLOW_TEST_PREFIX) for test in tests if test.startswith(SLOW_TEST_PREFIX)]
    status = int(pytest.main([*ARGUMENTS, "-m", FAST, *fast_tests])) if fast_tests else 0
    return int(pytest.main([*ARGUMENTS, "-m", SLOW, *slow_tests])) if status in FINE and slow_tests else status


def plant_fault(module: str, fault: Fault) -> None:
    """Replace the code of the function that contains the fault, in every function object of the process."""
    path, source_before = str(ROOT / module), (ROOT / module).read_text(encoding="utf-8")
    old_code, new_code = (
        _find_function_code(compile(source, path, "exec"), fault.line) for source in (source_before, fault.source)
    )
    functions = [
        function
        for function in gc.get_objects()
        if isinstance(function, FunctionType)
        and function.__code__.co_filename == path
        and (function.__code__.co_qualname, function.__code__.co_firstlineno)
        == (old_code.co_qualname, old_code.co_firstlineno)
    ]
    if not functions:
        raise LookupError(f"{module}:{fault.line}: nobody has imported {old_code.co_qualname}")
    for function in functions:
        function.__code__ = new_code


def _find_function_code(code: CodeType, line: int) -> CodeType:
    """Return the code of the outermost function around this line."""
    code_candidates = [
        constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_firstlineno <= line
    ]
    innermost_code = max(code_candidates, key=attrgetter("co_firstlineno"))
    return innermost_code if innermost_code.co_flags & CO_OPTIMIZED else _find_function_code(innermost_code, line)


class Verdicts:
    """The results of earlier runs. Each result is written to a file immediately, so a stopped run can be continued."""

    def __init__(self, seconds: float, *, ignore_earlier: bool) -> None:
        self.seconds = seconds
        self._file = BUILD / "verdicts.txt"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        lines = "" if ignore_earlier else self._file.read_text(encoding="utf-8")
        self._results_by_key = dict(line.split() for line in lines.splitlines())

    def get(self, module: str, fault: Fault, tests: list[str]) -> bool | None:
        """Return whether a test noticed the fault, or None if the fault must be tried.

        A fault must be tried if it never was, or if it was missed and its tests have changed since.
        """
        if _compute_digest(module, fault) in self._results_by_key:
            return True
        return False if _compute_digest(module, fault, *map(_read_test_text, tests)) in self._results_by_key else None

    def add(self, module: str, fault: Fault, tests: list[str], *, is_seen: bool) -> None:
        """Add a result. It is valid until the function changes or, if the fault was missed, until a test changes."""
        key = (
            _compute_digest(module, fault) if is_seen else _compute_digest(module, fault, *map(_read_test_text, tests))
        )
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{key} {'seen' if is_seen else 'missed'}\n")


def _compute_digest(module: str, fault: Fault, *tests: str) -> str:
    text = "\n".join((module, fault.kind, _find_function_source(fault), *tests))
    return sha256(text.encode()).hexdigest()


def _find_function_source(fault: Fault) -> str:
    """Return the source of the innermost function around the fault, with the fault."""
    functions = [
        node
        for node in ast.walk(ast.parse(fault.source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= fault.line <= (node.end_lineno or 0)
    ]
    return ast.unparse(functions[-1]) if functions else fault.source


@cache
def _read_test_text(test: str) -> str:
    return (ROOT / test.removeprefix(SLOW_TEST_PREFIX)).read_text(encoding="utf-8")


def plant_in_room(name: str, modules: dict[str, list[str]], verdicts: Verdicts) -> float:
    """Plant each new fault into each of these modules, print the survivors, and return the fraction noticed."""
    kinds, survivors, excused_count, untried_count = Counter[str](), Counter[str](), 0, 0
    excuses = {(entry["module"], entry["kind"], entry["line"]) for entry in read_unseen_faults()}
    for module, tests in modules.items():
        source = (ROOT / module).read_text(encoding="utf-8")
        lines_by_fault = {fault: source.splitlines()[fault.line - 1].strip() for fault in list_faults(source)}
        counted_faults = [fault for fault, text in lines_by_fault.items() if (module, fault.kind, text) not in excuses]
        excused_count += len(lines_by_fault) - len(counted_faults)
        untested_faults = [fault for fault in counted_faults if verdicts.get(module, fault, tests) is None]
        untried_count += len(untested_faults)
        missed_faults = [fault for fault in counted_faults if verdicts.get(module, fault, tests) is False]
        kinds.update(fault.kind for fault in counted_faults)
        kinds.subtract(fault.kind for fault in untested_faults)
        for fault, is_noticed_by_test in chain(
            ((fault, False) for fault in missed_faults), _test_faults(module, tests, untested_faults, verdicts)
        ):
            untried_count -= fault in untested_faults
            kinds[fault.kind] += fault in untested_faults
            if not is_noticed_by_test:
                survivors[fault.kind] += 1
                print(f"  {module}:{fault.line}: {fault.kind}: {lines_by_fault[fault]}", flush=True)
    counts_text = ", ".join(f"{kind} {kinds[kind] - survivors[kind]} of {kinds[kind]}" for kind in sorted(kinds))
    fraction_noticed = 1 - survivors.total() / kinds.total() if kinds.total() else math.nan
    fraction_text = f"{fraction_noticed:.0%} of {kinds.total()} seen ({counts_text})"
    print(f"{name}: {fraction_text}; {excused_count} excused, {untried_count} not tried", flush=True)
    return fraction_noticed


def _test_faults(
    module: str, tests: list[str], untested_faults: list[Fault], verdicts: Verdicts
) -> Iterator[tuple[Fault, bool]]:
    """Plant these faults until the time limit is reached, and yield each fault with whether a test noticed it."""
    if not untested_faults:
        return
    with redirect_stdout(StringIO()):  # this imports the tests
        pytest.main([*ARGUMENTS, "--collect-only", *{test.removeprefix(SLOW_TEST_PREFIX) for test in tests}])
    lines, total_seconds = find_tests_by_line(module, tests)
    waiting_faults, running_tests, deadline = (
        [*reversed(untested_faults)],
        dict[Fault, ForkedRun](),
        time.monotonic() + verdicts.seconds,
    )
    while running_tests or (waiting_faults and time.monotonic() < deadline):
        if waiting_faults and len(running_tests) < AT_ONCE and time.monotonic() < deadline:
            fault = waiting_faults.pop()
            run_fault = partial(run_with_fault, module, fault, tests, lines.get(fault.line, []))
            running_tests[fault] = ForkedRun(run_fault, max(SECONDS, TIMEOUT_FACTOR * total_seconds))
            continue
        for fault, forked_run in [*running_tests.items()]:
            if (is_noticed_by_test := forked_run.result()) is not None:
                del running_tests[fault]
                verdicts.add(module, fault, tests, is_seen=is_noticed_by_test)
                yield fault, is_noticed_by_test
        time.sleep(0.05)


def read_rooms() -> dict[str, dict[str, list[str]]]:
    """Return the modules of each room of statements.toml, each with its tests, the fastest first."""
    return tomllib.loads((HERE / "statements.toml").read_text(encoding="utf-8"))


def read_unseen_faults() -> list[dict[str, str]]:
    """Return the faults that behave like the original, each with its module, kind, first line and reason."""
    entries = tomllib.loads((HERE / "unseen.toml").read_text(encoding="utf-8"))
    return [
        {"module": module, "kind": kind, "line": line, "why": reason}
        for module, kinds in entries.items()
        for kind, lines in kinds.items()
        for line, reason in lines.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="?", default="", help="a room, or the end of a module's path")
    parser.add_argument("--anew", action="store_true", help="try again what was tried before")
    parser.add_argument("--seconds", type=float, default=math.inf, help="plant nothing more after so long")
    arguments = parser.parse_args()
    chosen_rooms = {
        name: {
            module: tests
            for module, tests in room.items()
            if arguments.where == name or module.endswith(arguments.where)
        }
        for name, room in read_rooms().items()
    }
    if not any(chosen_rooms.values()):
        parser.error(f"where: no room and no module of statements.toml is named {arguments.where}")
    os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", AWS_DEFAULT_REGION="eu-west-1")  # noqa: S106  stand-ins take any
    # One failing example is enough. A search for a smaller one could take up to the time limit.
    settings.register_profile("faults", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate))
    verdicts = Verdicts(arguments.seconds, ignore_earlier=arguments.anew)
    fractions_noticed = [plant_in_room(name, modules, verdicts) for name, modules in chosen_rooms.items() if modules]
    return int(min(fractions_noticed) < 0.9)


if __name__ == "__main__":
    sys.exit(main())
