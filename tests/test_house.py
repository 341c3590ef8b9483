"""Checks the project's own rules that no other tool checks."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
from public_api import PUBLIC

from leasehold import balancer

ROOT = Path(__file__).parents[1]
LINKS = ("balancer", "stores", "adapters")
PACKAGES = ("leasehold", "lab/leasehold_lab")
PROGRAMS = ("benchmarks", "lab/chaos", "lab/fuzz", "lab/mutation", "lab/spark")
FOLDERS = ("leasehold", "lab", "tests", "benchmarks", "specs", "docs", ".ci")
GENERATED = "_pb2.py"

# The balancer may import only modules for values and arithmetic. Any other import needs a reason and a line here.
ALLOWED = {
    "attrs",
    "leasehold.balancer",
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
# Built-in functions that do input or output, or whose results differ between processes.
FORBIDDEN_CALLS = {"__import__", "breakpoint", "eval", "exec", "hash", "id", "input", "open", "print"}

# Paths in folders of a developer's machine.
MACHINE_PATH = re.compile(r"(?<![\w.~])/(work|root|home|Users|tmp)/")
TEXT_SUFFIXES = {
    "",
    ".cfg",
    ".cjs",
    ".go",
    ".java",
    ".json",
    ".lock",
    ".md",
    ".py",
    ".toml",
    ".txt",
    ".xml",
    ".yaml",
    ".yml",
}


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


def _imported_packages(node: ast.AST) -> list[str]:
    """Return the packages that an import statement names. Modules of our own are reduced to their package."""
    match node:
        case ast.Import(names=names):
            return [_package(alias.name) for alias in names]
        case ast.ImportFrom(level=0, module=str(module)):
            return [_package(module)]
        case _:
            return []


def _package(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 1 + (parts[0] == "leasehold")])


def test_imports_do_not_go_through_links() -> None:
    """If a module were loaded under two names, there would be two sets of its classes."""
    assert [(ROOT / link).readlink() for link in LINKS] == [Path("leasehold") / link for link in LINKS]
    violations = [
        f"{_name(path)}:{node.lineno} imports {module}"
        for path in _sources(*PACKAGES, "tests", *PROGRAMS)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in _imported_packages(node)
        if module in LINKS
    ]
    assert violations == []


def test_balancer_imports_only_what_is_allowed() -> None:
    violations = [
        f"{_name(path)}:{node.lineno} imports {module}"
        for path in _sources("leasehold/balancer")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in _imported_packages(node)
        if module not in ALLOWED
    ]
    assert violations == []


def test_balancer_calls_no_forbidden_builtin() -> None:
    """The balancer does not print anything, and its decisions do not depend on a process's hash seed."""
    violations = [
        f"{_name(path)}:{node.lineno} calls {node.func.id}"
        for path in _sources("leasehold/balancer")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    ]
    assert violations == []


def test_balancer_needs_only_attrs() -> None:
    """An application that embeds the planner needs no cloud library."""
    modules = sorted(
        _name(path)[:-3].replace("/", ".") for path in _sources("leasehold/balancer") if path.stem != "__init__"
    )
    code = f"""
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {{"attr", "attrs", "leasehold", *sys.stdlib_module_names}}:
            raise ImportError(name + " is not attrs")
sys.path.insert(0, {str(ROOT)!r})
sys.meta_path.insert(0, Blocker())
print(*(importlib.import_module(name).__name__ for name in {modules!r}))
"""
    completed_process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (completed_process.stdout.split(), completed_process.stderr) == (modules, "")


def test_every_source_file_opens_with_a_sentence() -> None:
    sentence_pattern = re.compile(r'"""[A-Za-z`].{15,}\.("""\n|\n)')
    violations = [
        _name(path) for path in _sources(*FOLDERS) if not sentence_pattern.match(path.read_text(encoding="utf-8"))
    ]
    assert violations == []


def test_public_names_have_one_short_address() -> None:
    """Each public name has exactly one address, and a new one must be added to the list on purpose."""
    addresses = {address: import_module(address) for address in PUBLIC}
    names_by_address = {address: list(module.__all__) for address, module in addresses.items()}
    names = Counter(chain.from_iterable(names_by_address.values()))
    # Authors of handlers need `Delivery` at several addresses. Authors of stores need the errors next to the protocol.
    assert {name for name, count in names.items() if count > 1} == {"Delivery", "OutcomeUnknown", "StoreError"}
    planner = {*names_by_address["leasehold"], *names_by_address["leasehold.planner"]} & {*balancer.__all__}
    assert planner == {*balancer.__all__}  # each name of the planner is listed
    assert {address: sorted(address_names) for address, address_names in names_by_address.items()} == {
        address: sorted(name for names in reasons.values() for name in names.split())
        for address, reasons in PUBLIC.items()
    }
    assert [
        f"{address}.{name}"
        for address in PUBLIC
        for name in names_by_address[address]
        if not hasattr(addresses[address], name)
    ] == []


def _exception_names(tree: ast.Module) -> set[str]:
    """Return the variables and parameters of a module that hold exceptions."""
    handler_names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    arguments = (node for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None)
    return handler_names | {
        argument.arg for argument in arguments if "Exception" in ast.unparse(argument.annotation or argument)
    }


def _formats_exception(node: ast.AST, faults: set[str]) -> bool:
    """Return whether code formats an exception by its `__repr__`, or one that it does not know by its `__str__`."""
    match node:
        case ast.FormattedValue(value=ast.Name(id=name), conversion=conversion):
            return name in faults and conversion in {ord("r"), ord("a")}
        case ast.Call(func=ast.Name(id="repr"), args=[ast.Name(id=name)]):
            return name in faults
        case ast.ExceptHandler(type=ast.Name(id="Exception" | "BaseException"), name=str(name)):
            return any(
                (isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) and part.value.id == name)
                or (isinstance(part, ast.Call) and ast.unparse(part) == f"str({name})")
                for part in ast.walk(node)
            )
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log")), args=[ast.Constant(value=str(text)), *arguments]):
            conversions = re.findall(r"%[\d.]*([a-z])", text)
            return any(
                specifier == "r" and isinstance(part, ast.Name) and part.id in faults
                for specifier, part in zip(conversions, arguments, strict=False)
            )
        case _:
            return False


def test_exceptions_are_shown_only_by_error_summary() -> None:
    """If an exception's `__repr__` raises or never returns, it ends or blocks the thread that reports the exception."""
    violations = [
        f"{_name(path)}:{node.lineno}"  # type: ignore[attr-defined]  # every node that is shown has a line
        for path in _sources(*PACKAGES)
        for tree in [_tree(path)]
        for faults in [_exception_names(tree)]
        for node in ast.walk(tree)
        if _formats_exception(node, faults)
    ]
    assert violations == []


THREAD_STARTERS = {"Thread", "Timer", "start_new_thread"}
"""Calls that start a thread whose failure would not be reported."""

THREADS_OF_THEIR_OWN = {
    "leasehold/adapters/threads.py",  # spawn itself
    "lab/leasehold_lab/standins/guard.py",  # a script for an interpreter without the project
}


def test_threads_are_started_only_by_spawn() -> None:
    """Threads are started by `spawn`, which reports their failures."""
    violations = {
        _name(path)
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
        in THREAD_STARTERS
    }
    assert violations == THREADS_OF_THEIR_OWN


def test_signal_handlers_are_set_where_a_fork_restores_them() -> None:
    """Only `signals.py` sets our own signal handlers, because it restores the program's handlers in child processes."""
    violations = {
        _name(path)
        for path in _sources(*PACKAGES)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "signal.signal"
        and ast.unparse(node.args[1]) not in {"signal.SIG_DFL", "signal.SIG_IGN"}
    }
    assert violations == {"leasehold/adapters/signals.py"}


def test_every_private_function_is_used() -> None:
    unused = []
    for path in chain.from_iterable(sorted((ROOT / package).rglob("*.py")) for package in PACKAGES):
        tree = ast.parse(path.read_text("utf-8"))
        defined_names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        unused += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in sorted(defined_names - used_names)
            if re.match("_[A-Za-z]", name)
        ]
    assert unused == []


def _documented_attributes(node: ast.ClassDef) -> list[str]:
    """Return the names in the section `Attributes:` of a class's docstring."""
    section = re.search(r"(?ms)^Attributes:\n(.*?)(?=^\S|\Z)", ast.get_docstring(node) or "")
    entries = re.findall(r"(?m)^ {4}(\w+(?:, \w+)*): ", section[1] if section else "")
    return [name for names in entries for name in names.split(", ")]


def _names_in(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, methods and parameters, and of everything that its code refers to."""
    return {
        str(getattr(part, field))
        for part in ast.walk(node)
        for field in ("id", "attr", "name", "arg")
        if hasattr(part, field)
    }


def test_documented_attributes_exist() -> None:
    """If an attribute is renamed, its entry in the class's docstring must be renamed, too."""
    missing_attributes = [
        f"{_name(path)}: {node.name}.{name}"
        for path in _sources(*PACKAGES, "tests")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
        for name in _documented_attributes(node)
        if name not in _names_in(node)
    ]
    assert missing_attributes == []


def test_tests_patch_nothing_that_other_threads_use() -> None:
    """All threads share functions such as `time.sleep`. A patched one would also affect a thread of an earlier test."""
    through = re.compile(r'"leasehold[\w.]*\.(os|random|shutil|signal|socket|subprocess|sys|threading|time)\.\w+"')
    violations = [
        f"{_name(path)}: {match[0]}"
        for path in _sources("tests")
        for match in through.finditer(path.read_text("utf-8"))
    ]
    assert violations == []


def test_tests_never_import_moto_in_process() -> None:
    """When moto is imported, it hooks all clients that boto3 creates later. Their calls then no longer bypass boto3."""
    alone = "tests/standins/iam_server.py"  # this module runs in a process of its own
    violations = {
        _name(path)
        for path in _sources("tests", *PROGRAMS)
        for node in ast.walk(_tree(path))
        if "moto" in _imported_packages(node)
    }
    assert violations == {alone}


def test_test_modules_have_unique_names() -> None:
    """Tests import helper modules by bare names. If two modules had the same name, the wrong one might be imported."""
    names = Counter(path.name for path in _sources("tests", *PROGRAMS) if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


REPEATED = "tests/sources/kinesis/test_wire_views.py"
"""This module runs the tests of `test_wire.py` again with the scanner in C."""


def test_test_modules_are_not_imported_by_others() -> None:
    """Code that several test modules use is in a module without tests."""
    violations = {
        _name(path)
        for path in _sources("tests", *PROGRAMS)
        for node in ast.walk(_tree(path))
        if any(module.startswith("test_") for module in _imported_packages(node))
    }
    assert violations == {REPEATED}


def _named_types(tree: ast.Module) -> Iterator[str]:
    """Yield the names of all classes in a module, including nested ones, and of its type aliases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lstrip("_")
            if name[:1].isupper() and not name.isupper():
                yield name


def test_class_names_are_unique() -> None:
    paths_by_class: dict[str, list[str]] = defaultdict(list)
    for path in _sources(*PACKAGES):
        for name in sorted(set(_named_types(_tree(path)))):
            paths_by_class[name].append(_name(path))
    assert {name: paths for name, paths in paths_by_class.items() if len(paths) > 1} == {}


def test_files_name_no_path_of_a_developers_machine() -> None:
    top = (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git")
    violations = [
        f"{_name(path)}:{number}: {line.strip()[:80]}"
        for path in chain(top, _files(*FOLDERS))
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert violations == []


def _node_locks() -> list[Path]:
    return [path for path in _files("lab", "tests") if path.name == "package-lock.json"]


def test_locks_name_no_registry() -> None:
    """A lock must not name the registry from which it was made, because that may be a private mirror."""
    locks = [*ROOT.glob("*.lock"), *_node_locks()]
    assert {lock.name for lock in locks} == {
        "requirements.lock",
        "requirements-build.lock",
        "requirements-amqp.lock",
        "requirements-changelog.lock",
        "requirements-lambda.lock",
        "requirements-supply.lock",
        "requirements-mutants.lock",
        "requirements-atheris.lock",
        "requirements-spark-4.0.lock",
        "requirements-spark-4.1.lock",
        "package-lock.json",
    }
    assert [_name(lock) for lock in locks if "://" in lock.read_text()] == []


def test_every_locked_package_has_a_digest() -> None:
    packages = [
        (name, "integrity" in entry)
        for lock in _node_locks()
        for name, entry in json.loads(lock.read_text())["packages"].items()
        if name
    ]
    assert [name for name, pinned in packages if not pinned] == []


@pytest.mark.parametrize(
    "page",
    [
        "specs/architecture.md",
        "docs/guarantees.md",
        "benchmarks/results/reliability.md",
        "specs/why-nothing-is-skipped.md",
    ],
)
def test_pages_name_only_what_exists(page: str) -> None:
    missing_names = []
    for name, inner_names in re.findall(r"`([\w./-]+\.py)(?:::?([\w.]+))?`", (ROOT / page).read_text(encoding="utf-8")):
        files = [
            path
            for path in (ROOT / folder / name for folder in ("", "lab", "leasehold", "leasehold/adapters"))
            if path.exists()
        ]
        text = files[0].read_text(encoding="utf-8") if files else ""
        missing_names += [
            f"{name}: {word}" for word in inner_names.split(".") if not files or not re.search(rf"\b{word}\b", text)
        ]
    assert missing_names == []
