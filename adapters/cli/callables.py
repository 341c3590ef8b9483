"""From `module:function` on the command line to the function."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def load(text: str) -> Callable[..., Any]:
    """The function named. Raises ValueError, saying what is missing."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{text!r} is not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a command, unlike `python -m`, does not look in the folder it is called in
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as missing:
        raise ValueError(f"{text!r}: there is no module {missing.name!r} here") from missing
    if not callable(found):
        raise ValueError(f"{text!r}: module {module!r} has no function {name!r}")  # noqa: TRY004  bad usage
    function: Callable[..., Any] = found
    return function
