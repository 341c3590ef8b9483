"""Plants the faults that mutmut has no operator for, one at a time, and says which of them no test sees, by room.

    python tests/mutation/statements.py                 all rooms of statements.toml
    python tests/mutation/statements.py worker --each 4 every fourth fault of one room

Two statements change places; a guard goes on where it would return; a reset is left out; a `finally` does nothing.
The tests run in a fork of this process, in a copy under build/statements, first those that run the line, and stop at
the first that fails. What nobody can tell from the original stands in unseen.toml with its reason, and counts for
nothing.
"""

# ruff: noqa: T201  a script says what it found

import argparse
import ast
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from attrs import frozen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 120.0
SLOWER = 5.0
"""A fault under which the tests take longer than both, and so many times as long as without it, has been seen."""

RESETS = frozenset({"clear", "discard", "remove", "pop", "popleft", "cancel", "set", "close", "rest"})
"""Methods that put something back."""

ARGUMENTS = (
    *("-x", "-q", "--noconftest", "-p", "no:leasehold", "--hypothesis-profile", "ci", "-p", "no:cacheprovider"),
    *("-p", "no:unraisableexception", "-p", "no:threadexception", "-o", "pythonpath=tests", "-o", "addopts="),
)
FAST, SLOW = "not (more or services or spark or slow)", "not (more or services or spark)"
THOROUGH = "slow:"
"""Before a test that is asked only about what the others do not see."""
FINE = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
"""No test failed; where all that run the line were asked before, none may be left."""


@frozen
class Fault:
    """A change of a few lines: its kind, the first line it touches, and the whole module with it."""

    kind: str
    line: int
    source: str


def faults(source: str) -> Iterator[Fault]:
    """Every fault that can be planted into this module."""
    for node in ast.walk(ast.parse(source)):
        within = not isinstance(node, ast.Module | ast.ClassDef)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if within and isinstance(block, list):
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    continue  # nothing is there to put back, and the order seldom matters
                yield from _swaps(source, block)
                yield from (_dropped(source, "reset", each, each) for each in block if _resets(each))
        if isinstance(node, ast.If) and not node.orelse and isinstance(last := node.body[-1], _LEAVES):
            yield _dropped(source, "guard", last, last)
        if isinstance(node, ast.Try) and node.finalbody:
            yield _dropped(source, "finally", node.finalbody[0], node.finalbody[-1])


_LEAVES = ast.Return | ast.Continue | ast.Break | ast.Raise


def _swaps(source: str, block: list[ast.stmt]) -> Iterator[Fault]:
    """Neighbours that both do something, one by a call alone; the second needs no name that the first has bound."""
    for first, second in pairwise(block):
        calls = isinstance(first, ast.Expr) or isinstance(second, ast.Expr)
        apart = _marks(first) and _marks(second) and not _share(first, second)
        if _acts(first) and _acts(second) and calls and not apart and not (_bound(first) & _read(second)):
            lines = source.splitlines(keepends=True)
            one, two = lines[first.lineno - 1 : first.end_lineno], lines[second.lineno - 1 : second.end_lineno]
            between = lines[first.end_lineno or 0 : second.lineno - 1]
            lines[first.lineno - 1 : second.end_lineno] = [*two, *between, *one]
            yield Fault("swap", first.lineno, "".join(lines))


def _acts(statement: ast.stmt) -> bool:
    """A call, or an assignment, that is not a word for people."""
    if isinstance(statement, ast.Assign | ast.AugAssign):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and not ast.unparse(call.func).startswith("log.")


MARKS = frozenset({"add", "append", "clear", "discard", "extend", "notify_all"})
PURE = frozenset({"int", "len", "list", "max", "min", "range", "sum", "tuple"})


def _marks(statement: ast.stmt) -> bool:
    """Whether it does no more than note something: it cannot fail, and nobody else acts by it at once."""
    calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
    if isinstance(statement, ast.Expr):
        calls = [each for each in calls if not (isinstance(each.func, ast.Attribute) and each.func.attr in MARKS)]
    return all(isinstance(each.func, ast.Name) and each.func.id in PURE for each in calls)


def _share(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether one changes what the other reads or changes, so that two marks in another order say something else."""
    return bool(_changed(first) & _touched(second) or _changed(second) & _touched(first))


def _changed(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        func = statement.value.func
        return {ast.unparse(func.value)} if isinstance(func, ast.Attribute) else set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", statement)]
    return {
        ast.unparse(each.value if isinstance(each, ast.Subscript) else each)
        for target in targets
        for each in (target.elts if isinstance(target, ast.Tuple) else [target])
    }


def _touched(statement: ast.stmt) -> set[str]:
    return {ast.unparse(each) for each in ast.walk(statement) if isinstance(each, ast.Name | ast.Attribute)}


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, context)}


def _bound(statement: ast.stmt) -> set[str]:
    return _names(statement, ast.Store)


def _read(statement: ast.stmt) -> set[str]:
    return _names(statement, ast.Load)


def _resets(statement: ast.stmt) -> bool:
    """A constant, or nothing, that is put into an attribute, and a method that puts back or sets free."""
    if isinstance(statement, ast.Assign):
        value = statement.value
        empty = isinstance(value, ast.Constant) or (isinstance(value, ast.Tuple | ast.List) and not value.elts)
        return empty and isinstance(statement.targets[0], ast.Attribute | ast.Subscript)
    if not (isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call)):
        return isinstance(statement, ast.Delete)
    return isinstance(call.func, ast.Attribute) and call.func.attr in RESETS


def _dropped(source: str, kind: str, first: ast.stmt, last: ast.stmt) -> Fault:
    lines = source.splitlines(keepends=True)
    lines[first.lineno - 1 : last.end_lineno] = [f"{' ' * first.col_offset}pass\n"]
    return Fault(kind, first.lineno, "".join(lines))


class RunLines:
    """A plugin of pytest that notes which tests run which lines of a module, in any thread of its process."""

    def __init__(self, module: Path) -> None:
        self._module, self._test = str(module), ""
        self.tests = defaultdict[int, set[str]](set)
        self.seconds = defaultdict[str, float](float)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """What runs from now on is run by this test."""
        self._test = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long it took."""
        self.seconds[report.nodeid] += report.duration

    def trace(self, frame: FrameType, _event: str, _argument: object, /) -> Any:  # noqa: ANN401  as typeshed has it
        """Note a line; frames of other modules are not followed."""
        if frame.f_code.co_filename != self._module:
            return None
        self.tests[frame.f_lineno].add(self._test)
        return self.trace

    def run(self, arguments: list[str]) -> int:
        """Run pytest, and answer its status."""
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        status = int(pytest.main(arguments, plugins=[self]))
        sys.settrace(None)
        return status

    def told(self) -> str:
        """The tests by line, the quickest first, as JSON."""
        return json.dumps(
            {line: sorted(tests - {""}, key=self.seconds.__getitem__) for line, tests in self.tests.items()}
        )


def lines_of(place: Path, module: str, tests: list[str]) -> tuple[dict[int, list[str]], float]:
    """Which of the fast tests run which lines of this module, the quickest first, and how long all take.

    Ends the run if one fails.
    """
    told, lines = place / "lines.json", RunLines(place / module)
    told.unlink(missing_ok=True)

    def run(arguments: list[str]) -> int:
        status = lines.run(arguments)
        told.write_text(lines.told(), encoding="utf-8")
        return status

    began, fast = time.monotonic(), [each for each in tests if not each.startswith(THOROUGH)]
    slow = [each for each in tests if each not in fast]
    if _fails(place, ["-m", FAST, *fast], SLOWER * SECONDS, run) or seen(place, slow, [], SLOWER * SECONDS):
        sys.exit(f"{module}: its tests fail, or take too long, without any fault")
    found = {int(line): names for line, names in json.loads(told.read_text(encoding="utf-8")).items()}
    return found, time.monotonic() - began


def seen(place: Path, tests: list[str], first: list[str], limit: float) -> bool:
    """Whether these tests fail, or take longer, in the copy as it is: `first` of all, then the fast, then the slow."""
    fast = [each for each in tests if not each.startswith(THOROUGH)]
    slow = [each.removeprefix(THOROUGH) for each in tests if each.startswith(THOROUGH)]
    others = [*(f"--deselect={each}" for each in first), *fast]
    return (
        (bool(first) and _fails(place, first, limit))
        or (bool(fast) and _fails(place, ["-m", FAST, *others], limit))
        or (bool(slow) and _fails(place, ["-m", SLOW, *slow], limit))
    )


def _fails(place: Path, arguments: list[str], limit: float, run: Callable[[list[str]], int] = pytest.main) -> bool:
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.chdir(place)
        sys.path[:0] = [str(place)]
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        os._exit(int(run([*ARGUMENTS, *arguments]) not in FINE))
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def planted(name: str, modules: dict[str, list[str]], each: int) -> float:
    """Plant every so-manieth fault into each of these modules, tell the survivors, and answer the share seen."""
    place = ROOT / "build" / "statements" / name
    shutil.rmtree(place, ignore_errors=True)
    for folder in ("leasehold", "tests", "specs"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", place)
    kinds, alive, excused, number = Counter[str](), Counter[str](), 0, 0
    excuses = {(each["module"], each["kind"], each["line"]) for each in unseen()}
    for module, tests in modules.items():
        path, before = place / module, (ROOT / module).read_text(encoding="utf-8")
        lines, took = lines_of(place, module, tests)
        sys.dont_write_bytecode = True  # what was compiled for the run without a fault serves all others
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        for fault in faults(before):
            number += 1
            if number % each:
                continue
            text = before.splitlines()[fault.line - 1].strip()
            if (module, fault.kind, text) in excuses:
                excused += 1
                continue
            path.write_text(fault.source, encoding="utf-8")
            kinds[fault.kind] += 1
            if not seen(place, tests, lines.get(fault.line, []), max(SECONDS, SLOWER * took)):
                alive[fault.kind] += 1
                print(f"  {module}:{fault.line}: {fault.kind}: {text}", flush=True)
        path.write_text(before, encoding="utf-8")
        sys.dont_write_bytecode = False
    told = ", ".join(f"{kind} {kinds[kind] - alive[kind]} of {kinds[kind]}" for kind in sorted(kinds))
    share = 1 - alive.total() / max(1, kinds.total())
    print(f"{name}: {share:.0%} of {kinds.total()} seen ({told}); {excused} excused", flush=True)
    return share


def rooms() -> dict[str, dict[str, list[str]]]:
    """The modules of each room of statements.toml, each with its tests, the fastest first."""
    return tomllib.loads((HERE / "statements.toml").read_text(encoding="utf-8"))


def unseen() -> list[dict[str, str]]:
    """The faults that nobody can tell from the original: module, kind, its first line, and why."""
    listed = tomllib.loads((HERE / "unseen.toml").read_text(encoding="utf-8"))
    return [
        {"module": module, "kind": kind, "line": line, "why": why}
        for module, kinds in listed.items()
        for kind, lines in kinds.items()
        for line, why in lines.items()
    ]


def main() -> int:
    """Plant and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", nargs="?", choices=[*rooms()])
    parser.add_argument("--each", type=int, default=1, help="every so-manieth fault")
    asked = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", AWS_DEFAULT_REGION="eu-west-1")  # noqa: S106  stand-ins take any
    for shared in ("aiohttp", "boto3", "pyarrow", "pyspark.sql", "rich", "typer"):
        with suppress(ImportError):
            importlib.import_module(shared)  # once, and shared with every fork
    shares = [planted(name, room, asked.each) for name, room in rooms().items() if asked.room in {None, name}]
    return int(min(shares) < 0.9)


if __name__ == "__main__":
    sys.exit(main())
