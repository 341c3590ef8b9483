"""Compiles the performance-critical modules as a wheel does, into a temporary folder, to measure them."""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

# Appended at the end, because the path of a process may start with a folder of compiled packages.
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


def _import_modules() -> dict[str, ModuleType]:
    _forget()
    return {name.rsplit(".", 1)[1]: importlib.import_module(name) for name in (*_HOT_MODULES, *_USERS)}


@contextmanager
def _modules_restored() -> Iterator[None]:
    """Restore the imported modules at the end of the block."""
    modules = {name: importlib.import_module(name) for name in (*_HOT_MODULES, *_USERS)}
    try:
        yield
    finally:
        for name, module in modules.items():
            package, _, module_name = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[package], module_name, module)


@contextmanager
def as_installed() -> Iterator[Path]:
    """Yield a folder with all packages, compiled as in a wheel, for the import path of new processes.

    Without a compiler, a message is printed, and the packages are not compiled.
    """
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(_ROOT / "leasehold", Path(scratch) / "leasehold")
        try:
            compile_to(Path(scratch))
        except CannotCompile as error:
            print(f"NOT compiled: {error}")
        yield Path(scratch)


@contextmanager
def plain_and_compiled() -> Iterator[dict[str, dict[str, ModuleType]]]:
    """Yield the codec's modules in both forms, plain and compiled.

    Without a compiler, a message is printed, and only the plain form is yielded.
    """
    with tempfile.TemporaryDirectory() as scratch, _modules_restored():
        forms = {"plain": _import_modules()}
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
        forms["compiled"] = {**_import_modules(), "scan": importlib.import_module(_IN_C)}
        for package, path in zip(packages, paths, strict=True):
            package.__path__[:] = path
        sys.path.remove(scratch)
        yield forms
