"""Builds local services that are written in Go."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from leasehold.adapters.toolchain import ServiceError

BUILD_SECONDS = 1800


def run_go(what: str, folder: Path, *arguments: str) -> str:
    """Run go in this folder, into which it installs programs, and return its output.

    Raises ServiceError if go is missing, or with go's output if it fails.
    """
    go = shutil.which("go")
    if go is None:
        raise ServiceError(f"{what} is built from Go: put go on the PATH")
    completed = subprocess.run(
        [go, *arguments],
        cwd=folder,
        env={**os.environ, "GOBIN": str(folder), "GOWORK": "off"},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if completed.returncode:
        raise ServiceError(f"go could not build {what}:\n{completed.stderr.strip()}")
    return completed.stdout


def fetched(what: str, folder: Path, module: str, checksum: str) -> Path:
    """Download the sources of a module (MODULE@VERSION), and return their folder.

    Raises ServiceError if the sources do not have this checksum.
    """
    download = json.loads(run_go(what, folder, "mod", "download", "-json", module))
    if download["Sum"] != checksum:
        raise ServiceError(f"this {what} is not the one that was tried: its checksum differs")
    return Path(download["Dir"])
