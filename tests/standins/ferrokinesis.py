"""Runs ferrokinesis, the only local Kinesis with enhanced fan-out. It is built from its crate once per machine.

The program differs from Kinesis in several ways. GetRecords returns no child shards. A subscription returns them early,
but a merged shard only with its second parent. It ignores shard filters, allows a second subscription at any time, and
always reports that a reader is at the tip.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leasehold.adapters.toolchain import ServiceError, fill_once
from leasehold_lab.standins.node import Service, ServiceCommand, run_service

PROGRAM = Path(__file__).parent / "rust"
BINARY = "ferrokinesis-on-loopback"
CHECKSUM = "d92e4a5dd748ac982ac551a84ce96084daf7e68cff0b18acb8d0b57bc76c1e8f"
BUILD_SECONDS = 1800


@contextmanager
def ferrokinesis(*, subscription_seconds: float = 300.0, event_records: int = 10_000) -> Iterator[Service]:
    """Run a local Kinesis that boto3 can subscribe to.

    A subscription lasts `subscription_seconds`, and an event has at most `event_records` records.

    Raises ServiceError if cargo is missing, or with cargo's output if the build fails.
    """
    program = str(fill_once(f"ferrokinesis-{_digest()}", _build, shared=True) / BINARY)

    def command(port: int) -> ServiceCommand:
        return ServiceCommand((program, str(port), str(round(1000 * subscription_seconds)), str(event_records)))

    with run_service("ferrokinesis", command) as service:
        yield service


def _digest() -> str:
    sources = (PROGRAM / "Cargo.toml").read_bytes() + (PROGRAM / "src" / "main.rs").read_bytes()
    return hashlib.sha256(sources).hexdigest()[:12]


def _cargo() -> str:
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    program = shutil.which("cargo") or shutil.which("cargo", path=str(home / "bin"))
    if program is None:
        raise ServiceError("ferrokinesis is built from Rust: put cargo on the PATH")
    return program


def _build(folder: Path) -> None:
    cargo = _cargo()
    print("leasehold: building ferrokinesis with cargo, once (a few minutes) ...", file=sys.stderr, flush=True)  # noqa: T201  progress
    with tempfile.TemporaryDirectory(prefix="leasehold-cargo-") as temporary_folder:
        project = Path(temporary_folder) / "rust"
        shutil.copytree(PROGRAM, project)
        packages = json.loads(_run(cargo, project, "metadata", "--format-version", "1"))["packages"]
        if CHECKSUM not in (project / "Cargo.lock").read_text():
            raise ServiceError("this ferrokinesis is not the one that was tried: its checksum differs")
        # Use the author's lock, with digests, instead of the newest dependencies.
        (crate,) = (Path(package["manifest_path"]).parent for package in packages if package["name"] == "ferrokinesis")
        shutil.copy(crate / "Cargo.lock", project)
        _run(cargo, project, "build", "--quiet")
        shutil.copy(project / "target" / "debug" / BINARY, folder)


def _run(cargo: str, project: Path, *arguments: str) -> str:
    completed = subprocess.run(
        [cargo, *arguments],
        cwd=project,
        env={**os.environ, "CARGO_TARGET_DIR": str(project / "target")},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if completed.returncode:
        raise ServiceError(f"cargo could not build ferrokinesis:\n{completed.stderr.strip()}")
    return completed.stdout
