"""The hot files as a wheel carries them, compiled to a passing directory, beside the plain ones."""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hatch_build import HOT, CannotCompile, compile_to

_ROOT = Path(__file__).resolve().parents[1]
_HOT_MODULES = tuple(hot.removesuffix(".py").replace("/", ".") for hot in HOT)
_USERS = ("adapters.kinesis.aggregation", "adapters.kinesis.aggregation_arrow")


def _forget() -> None:
    for name in (*_HOT_MODULES, *_USERS):
        sys.modules.pop(name, None)


def _imported() -> dict[str, ModuleType]:
    _forget()
    return {name.rsplit(".", 1)[1]: importlib.import_module(name) for name in (*_HOT_MODULES, *_USERS)}


@contextmanager
def _given_back(package: ModuleType) -> Iterator[None]:
    """Whoever comes next in this process finds the modules that were there."""
    before = {name: importlib.import_module(name) for name in (*_HOT_MODULES, *_USERS)}
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules[name] = module
            setattr(package, name.rsplit(".", 1)[1], module)


@contextmanager
def as_installed() -> Iterator[Path]:
    """All packages with the hot files compiled, for the path of new processes; said, where there is no compiler."""
    with tempfile.TemporaryDirectory() as scratch:
        for package in ("adapters", "balancer", "stores"):
            shutil.copytree(_ROOT / package, Path(scratch) / package)
        try:
            compile_to(Path(scratch))
        except CannotCompile as error:
            print(f"NOT compiled: {error}")
        yield Path(scratch)


@contextmanager
def plain_and_compiled() -> Iterator[dict[str, dict[str, ModuleType]]]:
    """Both forms of every module of the codec; the plain one alone, and it is said, where there is no compiler."""
    kinesis = importlib.import_module("adapters.kinesis")
    with tempfile.TemporaryDirectory() as scratch, _given_back(kinesis):
        forms = {"plain": _imported()}
        try:
            compile_to(Path(scratch))
        except CannotCompile as error:
            print(f"NOT compiled, only the plain form is measured: {error}")
            yield forms
            return
        path = list(kinesis.__path__)
        sys.path.insert(0, scratch)
        kinesis.__path__.insert(0, str(Path(scratch) / "adapters" / "kinesis"))
        forms["compiled"] = _imported()
        kinesis.__path__[:] = path
        sys.path.remove(scratch)
        yield forms
