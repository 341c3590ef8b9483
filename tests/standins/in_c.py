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
        library_path = Path(folder) / f"scan{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = f"-I{sysconfig.get_path('include')}"
        flags = (*shlex.split(os.environ.get("CFLAGS", "")), *flags)
        command = [
            compiler,
            "-O1",
            "-Wall",
            "-shared",
            "-fPIC",
            include,
            *flags,
            str(ROOT / IN_C),
            "-o",
            str(library_path),
        ]
        subprocess.run(command, check=True, capture_output=True)
        spec = spec_from_file_location("scan", library_path, loader=ExtensionFileLoader("scan", str(library_path)))
        assert spec is not None
        module = module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(module)
        return module
