"""Compiles the hot files when a wheel is built; where that cannot be done the wheel carries them plain, and says so.

An editable install is left alone: it would go on running compiled files after their source changed. Also makes the
README for package indexes, where the repository's relative links lead nowhere.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HOT = (
    "leasehold/adapters/sources/kinesis/aggregation/wire.py",
    "leasehold/adapters/sources/kinesis/aggregation/encode.py",
    "leasehold/adapters/sources/kinesis/aggregation/spans.py",
    "leasehold/adapters/sources/kinesis/aggregation/places.py",
)
"""What is written so that mypyc can compile it."""

IN_C = "leasehold/adapters/sources/kinesis/cbor/scan.c"
"""What is written in C; where it is not compiled, cbor2 does the same. It asks for more of Python than its stable
interface has, and the others are made for one Python each anyway."""

PURE = "LEASEHOLD_PURE"
"""Set to anything, no file is compiled."""

CHECKED = ("--strict", "--follow-imports=skip", "--ignore-missing-imports")
"""What else they import is not looked at: a build in isolation has none of it, and has to compile the same."""

_SETUP = """
from mypyc.build import mypycify
from setuptools import Extension, setup

in_c = Extension({module!r}, [{in_c!r}])
setup(name="hot", packages=[], ext_modules=[*mypycify({arguments!r}, opt_level="3"), in_c])
"""


RELATIVE_LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)")


def index_readme(text: str, repository: str) -> str:
    """Make relative links absolute, or plain words while the repository has no address; pictures become links."""
    return RELATIVE_LINK.sub(rf"[\1]({repository}/blob/main/\2)" if repository else r"\1", text)


class ReadmeHook(MetadataHookInterface):
    """Sets the readme and the URLs of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add them to the metadata."""
        repository = str(self.config["repository"]).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_readme(text, repository)}
        metadata["urls"] = {"Repository": repository} if repository else {}


class CannotCompile(Exception):
    """No compiler, or it would not have it."""


def compile_to(directory: Path) -> tuple[Path, ...]:
    """Compile the hot files into a directory that mirrors the packages; the extension modules, relative to it."""
    root = Path(__file__).parent
    for hot in (*HOT, IN_C):
        (directory / hot).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / hot, directory / hot)
        for package in Path(hot).parents:
            (directory / package / "__init__.py").touch()
    (directory / "__init__.py").unlink()
    module = IN_C.removesuffix(".c").replace("/", ".")
    (directory / "setup.py").write_text(_SETUP.format(arguments=[*CHECKED, *HOT], in_c=IN_C, module=module))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", "scratch"]
    run = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)  # noqa: S603  our own
    if run.returncode:
        raise CannotCompile((run.stderr or run.stdout).strip().splitlines()[-1])
    shutil.rmtree(directory / "build")
    return tuple(sorted(file.relative_to(directory) for file in (*directory.rglob("*.so"), *directory.rglob("*.pyd"))))


class CompileHot(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own parameter is of no use here
    """Called by hatchling around the building of a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled files to the wheel, and name it after this platform."""
        self._scratch = Path(tempfile.mkdtemp(prefix="leasehold-"))
        if self.target_name != "wheel" or version == "editable" or os.environ.get(PURE):
            return
        try:
            for file in compile_to(self._scratch):
                build_data["force_include"][str(self._scratch / file)] = str(file)
        except CannotCompile as error:
            self.app.display_warning(f"aggregated records will be read and written by plain Python: {error}")
        else:
            build_data.update(pure_python=False, infer_tag=True)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002  its form
        """Clear away what was compiled, now that the wheel holds it."""
        shutil.rmtree(self._scratch, ignore_errors=True)
