"""Runs fake-gcs-server, which checks conditions correctly under concurrency. It is built from Go once per machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leasehold.adapters.toolchain import fill_once
from leasehold_lab.standins.node import HOST, Service, ServiceCommand, run_service
from standins.go_tool import fetched, run_go

MODULE, VERSION = "github.com/fsouza/fake-gcs-server", "v1.56.1"
CHECKSUM = "h1:K03sAvbLvDz4hAynpCCUqnNRp+ik9JFSvHbkD/wTPOU="


@contextmanager
def fake_gcs() -> Iterator[Service]:
    """Run a service with buckets in memory, open to all. Raises ServiceError if go is missing or the build fails."""
    program = str(fill_once(f"fake-gcs-server-{VERSION}", _build, shared=True) / "fake-gcs-server")

    def command(port: int) -> ServiceCommand:
        address_options = ("-host", HOST, "-port", str(port), "-public-host", f"{HOST}:{port}")
        return ServiceCommand(
            (program, "-backend", "memory", "-scheme", "http", "-log-level", "warn", *address_options)
        )

    with run_service("fake-gcs-server", command) as service:
        yield service


def _build(folder: Path) -> None:
    print("leasehold: building fake-gcs-server with go, once (a few minutes) ...", file=sys.stderr, flush=True)  # noqa: T201  progress
    fetched("fake-gcs-server", folder, f"{MODULE}@{VERSION}", CHECKSUM)
    # The build uses the go.sum of the module, which the checksum covers.
    run_go("fake-gcs-server", folder, "install", f"{MODULE}@{VERSION}")
