"""The rules of the house that no other tool holds."""

import ast
import contextlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("balancer", "stores", "adapters")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "specs", "docs", ".ci")
LINES_MAX = 300
FUNCTION_LINES_MAX = 50
GENERATED = "_pb2.py"

# What balancer may know of: values, and arithmetic on them. Anything else wants an argument, and a line here.
ALLOWED = {
    "attrs",
    "balancer",
    "bisect",
    "collections",
    "enum",
    "functools",
    "graphlib",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "typing",
}
# Built in, and yet input, output, or different from one process to the next.
FORBIDDEN_CALLS = {"__import__", "breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}

# Where somebody's own machine keeps things.
MACHINE_PATH = re.compile(r"(?<![\w.~])/(work|root|home|Users|tmp)/")
TEXT_SUFFIXES = {"", ".cfg", ".cjs", ".java", ".json", ".lock", ".md", ".py", ".toml", ".txt", ".xml", ".yaml", ".yml"}


def _files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and not {"__pycache__", "node_modules", "target"} & set(path.parts):
                yield path


def _sources(*folders: str) -> list[Path]:
    return [path for path in _files(*folders) if path.suffix == ".py" and not path.name.endswith(GENERATED)]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(level=0, module=str(module)):
            return [module.partition(".")[0]]
        case _:
            return []


def test_balancer_imports_only_what_is_allowed() -> None:
    """Without it a clock, a socket or a cloud's library could slip into the decision."""
    found = [
        f"{_name(path)}:{node.lineno} imports {module}"
        for path in _sources("balancer")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in _imported(node)
        if module not in ALLOWED
    ]
    assert found == []


def test_balancer_calls_nothing_that_speaks_or_differs() -> None:
    """Without it the decision could print, or depend on a process's own hash seed."""
    found = [
        f"{_name(path)}:{node.lineno} calls {node.func.id}"
        for path in _sources("balancer")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    ]
    assert found == []


def test_balancer_needs_attrs_alone() -> None:
    """Without it whoever embeds the planner might have to install a cloud's library."""
    modules = sorted(_name(path)[:-3].replace("/", ".") for path in _sources("balancer") if path.stem != "__init__")
    code = f"""
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {{"attr", "attrs", "balancer", *sys.stdlib_module_names}}:
            raise ImportError(name + " is not attrs")
sys.path.insert(0, {str(ROOT)!r})
sys.meta_path.insert(0, Blocker())
print(*(importlib.import_module(name).__name__ for name in {modules!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (modules, "")


def test_every_source_file_opens_with_a_sentence() -> None:
    """Without it a reader would have to open a file to learn what lives there."""
    sentence = re.compile(r'"""[A-Za-z`].{15,}\.("""\n|\n)')
    found = [_name(path) for path in _sources(*FOLDERS) if not sentence.match(path.read_text(encoding="utf-8"))]
    assert found == []


def test_files_are_short() -> None:
    """Without it a file would grow until nobody reads it to the end."""
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(*PACKAGES)}
    assert {name: lines for name, lines in lengths.items() if lines >= LINES_MAX} == {}


def test_functions_are_short() -> None:
    """Without it a rule could hide in a function that does not fit a screen."""
    found = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert found == []


def test_tests_open_with_a_sentence() -> None:
    """Without it a failing test would say that something broke, but not what it was good for."""
    found = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path in _sources("tests")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert found == []


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Tests import their neighbours by bare names: of two modules called the same, one would be taken for the other."""
    names = Counter(path.name for path in _sources("tests", "benchmarks") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_names_a_place_on_somebodys_machine() -> None:
    """Without it a command that works here only could reach a user."""
    top = (path for path in sorted(ROOT.iterdir()) if path.is_file())
    found = [
        f"{_name(path)}:{number}: {line.strip()[:80]}"
        for path in chain(top, _files(*FOLDERS))
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_locks_name_no_registry() -> None:
    """Without it a lock made behind a mirror would send everybody to that mirror."""
    locks = [*ROOT.glob("*.lock"), *(ROOT / "adapters").rglob("package-lock.json")]
    assert {lock.name for lock in locks} == {
        "requirements.lock",
        "requirements-build.lock",
        "requirements-amqp.lock",
        "package-lock.json",
    }
    assert [_name(lock) for lock in locks if "://" in lock.read_text()] == []


def test_every_locked_package_has_a_digest() -> None:
    """Without it a registry could hand out something other than what was tested."""
    packages = [
        (name, "integrity" in entry)
        for lock in (ROOT / "adapters").rglob("package-lock.json")
        for name, entry in json.loads(lock.read_text())["packages"].items()
        if name
    ]
    assert [name for name, pinned in packages if not pinned] == []


@pytest.mark.parametrize("page", ["README.md", "docs/embedding.md"])
def test_the_examples_say_what_they_do(page: str) -> None:
    """Without it the first thing a user copies could be wrong."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for code in [block for kind, block in blocks if kind == "python"]:
            exec(compile(code, page, "exec"), {})  # noqa: S102  the page is ours
    assert out.getvalue() == "".join(block for kind, block in blocks if kind == "text")
