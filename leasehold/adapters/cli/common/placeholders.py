"""Lets a command show its help even if the libraries that it needs to run are not installed.

A missing library is replaced by modules in which every attribute is an empty class. This is enough to import a command
and to read its options. The process must end after showing the help, because the placeholders stay imported.
"""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _PlaceholderClass(type):
    def __getattr__(cls, name: str) -> Any:  # noqa: ANN401  stands for anything
        if name.startswith("__"):
            raise AttributeError(name)
        return _PlaceholderClass(name, (Exception,), {})

    def __call__(cls, *_values: object, **_named: object) -> Any:  # noqa: ANN401  stands for anything
        return cls

    def __getitem__(cls, _key: object) -> Any:  # noqa: ANN401  stands for anything
        return cls

    def __ior__(cls, _other: object) -> Any:  # type: ignore[misc]  # noqa: ANN401  stands for anything
        return cls

    def __setitem__(cls, _key: object, _value: object) -> None:
        pass


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  stands for anything
        if name.startswith("__"):
            raise AttributeError(name)
        return _PlaceholderClass(name, (Exception,), {})


class _PlaceholderFinder(MetaPathFinder, Loader):
    def __init__(self, libraries: Collection[str]) -> None:
        self.libraries = libraries

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.libraries:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def install_placeholders(libraries: Collection[str]) -> Iterator[None]:
    """Within the context, import a placeholder for each of these libraries that is not installed."""
    finder = _PlaceholderFinder(libraries)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
