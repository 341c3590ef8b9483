"""Compiles the C module for the tests, because an editable install does not contain it.

The compiler also gets CFLAGS from the environment. `make fuzz-c` sets them so that each memory access is checked.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatch_build import IN_C

ROOT = Path(__file__).parents[2]


@cache
def scan(*flags: str) -> Any:  # noqa: ANN401  a module
    """Compile the module with these flags and return it, or None if there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"scan{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = f"-I{sysconfig.get_path('include')}"
        flags = (*shlex.split(os.environ.get("CFLAGS", "")), *flags)
        words = [compiler, "-O1", "-Wall", "-shared", "-fPIC", include, *flags, str(ROOT / IN_C), "-o", str(made)]
        subprocess.run(words, check=True, capture_output=True)
        spec = spec_from_file_location("scan", made, loader=ExtensionFileLoader("scan", str(made)))
        assert spec is not None
        module = module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(module)
        return module
