"""Starts the services of chaos runs. Each can be paused, and those that keep their data on disk can be restarted."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import boto3
import requests
from attrs import Factory, define, evolve, field, frozen
from azure.storage.blob import ContainerClient
from disk import Disk
from faulty_line import Refused
from processes import list_descendants
from standins.fake_gcs import fake_gcs
from standins.versitygw import REGION, versitygw
from unsteady_line import BUSY, SLOW_DOWN

from leasehold.adapters.toolchain import ServiceError
from leasehold.errors import OutcomeUnknown
from leasehold.stores.objects.blob import CONNECTION_STRING_VARIABLE as BLOB_CONNECTION
from leasehold.stores.protocol import Store
from leasehold.stores.urls import open_store
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.standins.node import Service
from leasehold_lab.standins.postgres import DATABASE, USER, run_postgres
from leasehold_lab.standins.services import AZURITE_ACCOUNT, azurite_connection_string, run_azurite, run_dynalite

OPEN_ATTEMPTS = 5
STORES = ("dynamodb", "azblob", "sqlite", "s3", "gcs", "postgres")


class ServiceMissing(Exception):
    """A service that a run needs is not available on this machine."""


@define
class ServiceControl:
    """A running service. `begin` starts it, with the data that it stored before."""

    begin: Callable[[], AbstractContextManager[Service]]
    service: Service = field(init=False)
    paused: bool = False
    _stack: ExitStack = Factory(ExitStack)

    def __attrs_post_init__(self) -> None:
        self.service = self._stack.enter_context(self.begin())

    def pause(self) -> None:
        """Stop the service's processes, so that it does not respond to requests."""
        self.paused = True
        self._signal_processes(signal.SIGSTOP)

    def resume(self) -> None:
        self.paused = False
        self._signal_processes(signal.SIGCONT)

    def _signal_processes(self, number: signal.Signals) -> None:
        """Signal the process group first, so that it starts no more processes, and then descendants in other groups."""
        with suppress(ProcessLookupError):
            os.killpg(self.service.pid, number)
        for pid in list_descendants(self.service.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def restart(self, while_stopped: Callable[[], object] = lambda: None) -> None:
        """Stop the service, call `while_stopped`, and start the service again on another port."""
        if self.service.name == "postgres":  # at SIGTERM, it would wait until all clients have disconnected
            os.kill(next(list_descendants(self.service.pid)), signal.SIGINT)
        self._stack.close()
        while_stopped()
        self.service = self._stack.enter_context(self.begin())

    def close(self) -> None:
        self.resume()
        self._stack.close()


@frozen
class Table:
    """The lease table of a run.

    Attributes:
        url: The URL of the store, with {endpoint} in place of the address of the service, if it has one.
        control: The service, or None if the table is a file on `disk`.
        secret: Additional environment variables of a worker. They may contain {endpoint}, too.
        refused: The error responses with which the service rejects requests.
        dated: Whether the service rejects requests whose signature has a very different time.
        wired: Whether the proxy of the service forwards bytes without parsing them into requests.
        lasts: Whether the service's data survives a restart.
    """

    url: str
    control: ServiceControl | None = None
    disk: Disk | None = None
    secret: Mapping[str, str] = Factory(dict)
    refused: tuple[Refused, ...] = BUSY
    dated: bool = False
    wired: bool = False
    lasts: bool = True

    def environment(self, endpoint: str) -> dict[str, str]:
        """Return the environment variables with the secrets, for this address of the service."""
        return {name: value.format(endpoint=endpoint) for name, value in self.secret.items()}


@contextmanager
def open_table(store: str, folder: Path, hub: str, layout: str = "") -> Iterator[Table]:
    """Create a table in a service of its own. Raises ServiceMissing if the service is not available.

    Args:
        store: One of `STORES`.
        folder: The folder for the data of the service.
        hub: The namespace and the name of the hub that the table is for, or "".
        layout: The layout of the table if it is not the default one of the store.
    """
    with ExitStack() as stack:
        name = f"chaos-{uuid4().hex[:8]}"
        if store == "sqlite":
            disk = stack.enter_context(Disk(folder / "disk").mount_folder())
            table = Table(f"sqlite:///{str(disk.file).lstrip('/')}", disk=disk)
        else:
            (data_folder := folder / store).mkdir(parents=True)
            if store == "postgres":  # for root, PostgreSQL runs as another user, who cannot read this folder
                data_folder = Path(stack.enter_context(TemporaryDirectory(prefix="leasehold-chaos-")))
                data_folder.chmod(0o755)
            try:
                control = ServiceControl(_choose_service(store, data_folder))
            except ServiceError as exc:
                raise ServiceMissing(str(exc)) from exc
            stack.callback(control.close)
            table = _TABLE_MAKERS[store](name, hub, control)
        separator = "&" if "?" in table.url else "?"
        yield evolve(table, url=f"{table.url}{separator}layout={layout}") if layout else table


def open_driver_store(url: str) -> Store:
    """Open the driver's store, whose requests time out after a second.

    On a busy machine, this may take several tries. The last one has the usual timeout.
    """
    for _ in range(OPEN_ATTEMPTS):
        with suppress(OutcomeUnknown):
            return open_store(url, request_seconds=1.0)
    return open_store(url)


def _choose_service(store: str, folder: Path) -> Callable[[], AbstractContextManager[Service]]:
    if store == "s3":
        return partial(versitygw, ENVIRONMENT["AWS_ACCESS_KEY_ID"], folder)
    if store == "gcs":
        return fake_gcs
    return partial({"dynamodb": run_dynalite, "azblob": run_azurite, "postgres": run_postgres}[store], folder)


def _make_dynamodb_table(name: str, _hub: str, control: ServiceControl) -> Table:
    region = ENVIRONMENT["AWS_DEFAULT_REGION"]
    return Table(f"dynamodb://{name}?region={region}&endpoint={{endpoint}}", control, refused=SLOW_DOWN)


def _make_azblob_table(name: str, hub: str, control: ServiceControl) -> Table:
    connection_string = azurite_connection_string(control.service)
    with ContainerClient.from_connection_string(connection_string, name) as container:
        container.create_container()
    query = f"eventhub={hub}&group=$Default" if hub else "prefix=app"
    # The connection string contains the port, which differs by worker.
    environment = {BLOB_CONNECTION: connection_string.replace(control.service.url, "{endpoint}")}
    return Table(f"azblob://{AZURITE_ACCOUNT}/{name}?{query}", control, secret=environment)


def _make_s3_table(name: str, _hub: str, control: ServiceControl) -> Table:
    key = ENVIRONMENT["AWS_ACCESS_KEY_ID"]
    client = boto3.client(
        "s3",
        endpoint_url=control.service.url,
        region_name=REGION,
        aws_access_key_id=key,
        aws_secret_access_key=key,
    )
    client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    client.close()
    return Table(f"s3://{name}/app?region={REGION}&endpoint={{endpoint}}", control, dated=True)


def _make_gcs_table(name: str, _hub: str, control: ServiceControl) -> Table:
    requests.post(f"{control.service.url}/storage/v1/b", json={"name": name}, timeout=60).raise_for_status()
    return Table(f"gcs://{name}/app?endpoint={{endpoint}}", control, lasts=False)


def _make_postgres_table(name: str, _hub: str, control: ServiceControl) -> Table:
    table = name.replace("-", "_")
    return Table(f"postgres://{{endpoint}}/{DATABASE}?user={USER}&table={table}", control, wired=True)


_TABLE_MAKERS = {
    "dynamodb": _make_dynamodb_table,
    "azblob": _make_azblob_table,
    "s3": _make_s3_table,
    "gcs": _make_gcs_table,
    "postgres": _make_postgres_table,
}
