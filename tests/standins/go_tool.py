"""Builds local services that are written in Go."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from leasehold.adapters.toolchain import ServiceError

BUILD_SECONDS = 1800


def run_go(program_name: str, folder: Path, *arguments: str) -> str:
    """Run go in this folder, into which it installs programs, and return its output.

    Raises ServiceError if go is missing, or with go's output if it fails.
    """
    go = shutil.which("go")
    if go is None:
        raise ServiceError(f"{program_name} is built from Go: put go on the PATH")
    completed_process = subprocess.run(
        [go, *arguments],
        cwd=folder,
        env={**os.environ, "GOBIN": str(folder), "GOWORK": "off"},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if completed_process.returncode:
        raise ServiceError(f"go could not build {program_name}:\n{completed_process.stderr.strip()}")
    return completed_process.stdout


def fetched(program_name: str, folder: Path, module: str, checksum: str) -> Path:
    """Download the sources of a module (MODULE@VERSION), and return their folder.

    Raises ServiceError if the sources do not have this checksum.
    """
    download = json.loads(run_go(program_name, folder, "mod", "download", "-json", module))
    if download["Sum"] != checksum:
        raise ServiceError(f"this {program_name} is not the one that was tried: its checksum differs")
    return Path(download["Dir"])
