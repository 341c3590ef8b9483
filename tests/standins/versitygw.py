"""Runs versitygw, which checks conditions correctly under concurrency, unlike moto. It is built from Go once."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leasehold.adapters.toolchain import fill_once
from leasehold_lab.standins.node import HOST, Service, ServiceCommand, run_service
from standins.go_tool import fetched, run_go

MODULE, VERSION = "github.com/versity/versitygw", "v1.8.0"
CHECKSUM = "h1:au+wI+aybno/STsQiSm35Uu6Q6iK5MWReQxgO6SEMFc="
KEY_ID = SECRET = "testing"  # noqa: S105  it opens nothing but a folder that is gone with its process
REGION = "eu-west-1"


@contextmanager
def versitygw(key: str = KEY_ID, root: Path | None = None) -> Iterator[Service]:
    """Run a service with buckets in `REGION`. Callers sign with `key` as id and secret. `root` is the folder for data.

    Raises ServiceError if go is missing, or with go's output if the build fails.
    """
    program = str(fill_once(f"versitygw-{VERSION}", _build, shared=True) / "versitygw")
    with tempfile.TemporaryDirectory(prefix="leasehold-buckets-", ignore_cleanup_errors=True) as temporary_folder:
        buckets, metadata = (Path(root or temporary_folder, name) for name in ("buckets", "facts"))
        for folder in (buckets, metadata):
            folder.mkdir(exist_ok=True)

        def command(port: int) -> ServiceCommand:
            # The metadata of objects is stored in separate files, because some folders lack extended attributes.
            options = ("--port", f"{HOST}:{port}", "--region", REGION, "--quiet", "posix", "--sidecar", str(metadata))
            keys = {"ROOT_ACCESS_KEY_ID": key, "ROOT_SECRET_ACCESS_KEY": key}
            return ServiceCommand((program, *options, str(buckets)), keys)

        with run_service("versitygw", command) as service:
            yield service


def _build(folder: Path) -> None:
    print("leasehold: building versitygw with go, once (a few minutes) ...", file=sys.stderr, flush=True)  # noqa: T201  progress
    fetched("versitygw", folder, f"{MODULE}@{VERSION}", CHECKSUM)
    # The build uses the go.sum of the module, which the checksum covers.
    run_go("versitygw", folder, "install", f"{MODULE}/cmd/versitygw@{VERSION}")
