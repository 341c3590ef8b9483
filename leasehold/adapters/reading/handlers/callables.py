"""Finds the function that `module:function` on the command line names."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from leasehold.stores.printable import said

IMPORTING = (__file__, importlib.__file__, "<frozen importlib")
"""Frames of a traceback that only lead to the user's file."""

LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Frames that the user's file led to."""


def load(text: str) -> Callable[..., Any]:
    """The function named. Raises ValueError, saying what is missing, or what is wrong in which line of which file."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"{text!r} is not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        # A command, unlike `python -m`, does not look in the folder it is called in. Last, or a file beside the user
        # would stand for a library of its name.
        sys.path.append(here)
    found = getattr(_imported(text, module), name, None)
    if not callable(found):
        raise ValueError(f"{text!r}: module {module!r} has no function {name!r}")  # noqa: TRY004  bad usage
    function: Callable[..., Any] = found
    return function


def _imported(text: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except SyntaxError as wrong:
        raise ValueError(f"{text!r}: {wrong.filename}, line {wrong.lineno}: {wrong.msg}") from wrong
    except Exception as wrong:
        if isinstance(wrong, ModuleNotFoundError) and not _place(wrong):
            raise ValueError(f"{text!r}: there is no module {wrong.name!r} here") from wrong
        raise ValueError(f"{text!r}: {_place(wrong)}: {said(wrong)}") from wrong


def _place(wrong: Exception) -> str:
    """The file and line that raised it; nothing where no file had begun to run."""
    frames = [each for each in traceback.extract_tb(wrong.__traceback__) if not each.filename.startswith(IMPORTING)]
    own = [each for each in frames if not each.filename.startswith(LIBRARIES)] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""
