"""The hot files as a wheel carries them, compiled to a passing directory, beside the plain ones."""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

# Last: before it, the path of a process may begin with a folder of compiled packages.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from hatch_build import HOT, IN_C, CannotCompile, compile_to

_ROOT = Path(__file__).resolve().parents[1]
_HOT_MODULES = tuple(hot.removesuffix(".py").replace("/", ".") for hot in HOT)
_USERS = (
    "leasehold.adapters.sources.kinesis.aggregation.decode",
    "leasehold.adapters.sources.kinesis.aggregation.arrow",
)
_IN_C = IN_C.removesuffix(".c").replace("/", ".")
_PACKAGES = sorted({name.rpartition(".")[0] for name in (*_HOT_MODULES, _IN_C)})


def _forget() -> None:
    for name in (*_HOT_MODULES, *_USERS):
        sys.modules.pop(name, None)


def _imported() -> dict[str, ModuleType]:
    _forget()
    return {name.rsplit(".", 1)[1]: importlib.import_module(name) for name in (*_HOT_MODULES, *_USERS)}


@contextmanager
def _given_back() -> Iterator[None]:
    """Whoever comes next in this process finds the modules that were there."""
    before = {name: importlib.import_module(name) for name in (*_HOT_MODULES, *_USERS)}
    try:
        yield
    finally:
        for name, module in before.items():
            package, _, last = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[package], last, module)


@contextmanager
def as_installed() -> Iterator[Path]:
    """All packages with the hot files compiled, for the path of new processes; said, where there is no compiler."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(_ROOT / "leasehold", Path(scratch) / "leasehold")
        try:
            compile_to(Path(scratch))
        except CannotCompile as error:
            print(f"NOT compiled: {error}")
        yield Path(scratch)


@contextmanager
def plain_and_compiled() -> Iterator[dict[str, dict[str, ModuleType]]]:
    """Both forms of every module of the codec; the plain one alone, and it is said, where there is no compiler."""
    with tempfile.TemporaryDirectory() as scratch, _given_back():
        forms = {"plain": _imported()}
        try:
            compile_to(Path(scratch))
        except CannotCompile as error:
            print(f"NOT compiled, only the plain form is measured: {error}")
            yield forms
            return
        packages = [importlib.import_module(name) for name in _PACKAGES]
        paths = [[*package.__path__] for package in packages]
        sys.path.insert(0, scratch)
        for package in packages:
            package.__path__.insert(0, str(Path(scratch).joinpath(*package.__name__.split("."))))
        forms["compiled"] = {**_imported(), "scan": importlib.import_module(_IN_C)}
        for package, path in zip(packages, paths, strict=True):
            package.__path__[:] = path
        sys.path.remove(scratch)
        yield forms
