"""A local stand-in for Event Hubs that works with the real `azure-eventhub` client.

With the stand-in, tests can check that the client

- opens links, authenticates, starts at a checkpoint and respects its prefetch limit,
- notices added partitions,
- loses its link to a reader with a higher epoch,
- is rejected if its epoch is lower or missing, or if its position is after the end of the partition,
- and reports detached links.

The stand-in does not imitate these parts of the service: throttling, quotas (except the limit of five readers without
an epoch per partition and consumer group), the timing of retention, TLS, role-based access, geo-replication, and the
assignment of keys to partitions. Events are kept in memory.

`python -m leasehold_lab.standins.hubs.event_hubs --hub flights=4 --port 0` prints `{"port": …}`, and serves until it is
stopped. It needs the package python-qpid-proton, which no extra of leasehold installs, because building that package
requires a C compiler.

If a hub has a port other than the default, the names of blobs differ between SDKs. Those for Python and Go include the
port, and those for Java and JavaScript don't. If SDKs must share blobs, the stand-in can also listen on the default
port of another loopback address.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from leasehold.adapters.toolchain import ServiceError
from leasehold_lab.standins.node import HOST, Service, ServiceCommand, run_service

KEY_NAME = "local"
SECONDS = 10.0
AMQP_PORT = 5672


@frozen
class LocalHubs:
    """The running stand-in for Event Hubs.

    Attributes:
        service: The process of the stand-in.
        key: The shared access key with which clients sign tokens. It is valid only for this process.
        address: A loopback address on whose default AMQP port the process also listens, or "".
    """

    service: Service
    key: str
    address: str = ""

    @property
    def namespace(self) -> str:
        """The namespace in blob names and source URLs: `address`, or the host and port if that is empty."""
        return self.address or f"localhost:{self.service.port}"

    def connection_string(self, hub: str = "") -> str:
        """Return a connection string for the SDKs, for one hub if `hub` is given."""
        parts_text = f"Endpoint=sb://{self.namespace};SharedAccessKeyName={KEY_NAME};SharedAccessKey={self.key}"
        # The SDK uses TLS unless this value is exactly "true", in lower case.
        return f"{parts_text};UseDevelopmentEmulator=true" + (f";EntityPath={hub}" if hub else "")

    def create(self, hub: str, partitions: int, groups: tuple[str, ...] = ()) -> None:
        """Create a hub, and delete an existing one with the same name.

        Without `groups`, any consumer group may be used.
        """
        self._send_control_request(do="create", hub=hub, count=partitions, groups=groups)

    def put(self, hub: str, partition: str, bodies: Iterable[str]) -> None:
        """Enqueue events with these bodies."""
        self._send_control_request(do="put", hub=hub, partition=partition, bodies=list(bodies))

    def trim_events(self, hub: str, partition: str, first_kept_number: int) -> int:
        """Remove the events before this sequence number, as retention does, and return their number."""
        return int(
            self._send_control_request(do="trim", hub=hub, partition=partition, before=first_kept_number)["trimmed"]
        )

    def add_partitions(self, hub: str, count: int) -> None:
        """Add empty partitions to a hub."""
        self._send_control_request(do="add-partitions", hub=hub, count=count)

    def detach_readers(self, hub: str, partition: str, condition: str = "amqp:link:detach-forced") -> int:
        """Detach all readers of a partition with this AMQP error, and return their number."""
        return int(
            self._send_control_request(do="detach", hub=hub, partition=partition, condition=condition)["detached"]
        )

    def drop(self, hub: str, partition: str) -> int:
        """Abort the connections of all readers of a partition, and return their number."""
        return int(self._send_control_request(do="drop", hub=hub, partition=partition)["dropped"])

    def list_partitions(self, hub: str) -> list[dict[str, Any]]:
        """Return a dictionary for each partition, with the number of its `events` and a list of its `readers`.

        Each reader has a `group`, an `epoch` and the number of events `sent` to it.
        """
        return list(self._send_control_request(do="look", hub=hub)["partitions"])

    def _send_control_request(self, **request: object) -> dict[str, Any]:
        with socket.create_connection((HOST, self.service.port), SECONDS) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            response: dict[str, Any] = json.loads(connection.makefile("rb").readline())
        if "error" in response:
            raise ServiceError(f"event-hubs: {request.get('do')}: {response['error']}")
        return response


def has_engine() -> bool:
    """Return whether the AMQP engine is installed. Without a compiler, python-qpid-proton is installed without it."""
    return importlib.util.find_spec("cproton_ffi") is not None


@contextmanager
def event_hubs(hubs: Mapping[str, int], *, key: str = "local-key", address: str = "") -> Iterator[LocalHubs]:
    """Run the stand-in with these hubs until the block ends. Any consumer group may be used.

    Args:
        hubs: The number of partitions of each hub, by name.
        key: The shared access key with which clients sign tokens.
        address: A loopback address whose default AMQP port is free, for SDKs that must use the same blob names.

    Raises:
        ServiceError: python-qpid-proton is not installed, or the process does not start.
    """
    if not has_engine():
        raise ServiceError(
            "local event hubs need an AMQP engine: pip install cffi python-qpid-proton, with a C compiler"
        )
    options = [option for name, count in hubs.items() for option in ("--hub", f"{name}={count}")]
    options += ["--address", address] if address else []

    def build_command(port: int) -> ServiceCommand:
        command_words = (sys.executable, "-m", "leasehold_lab.standins.hubs.event_hubs", "--port", str(port))
        return ServiceCommand((*command_words, *options), {"EVENT_HUBS_KEY": key})

    with run_service("event-hubs", build_command) as service:
        yield LocalHubs(service, key, address)


def main(arguments: list[str]) -> int:
    """Serve hubs until the process is stopped."""
    parser = argparse.ArgumentParser(
        prog="leasehold_lab.standins.hubs.event_hubs", description="Event hubs on this machine."
    )
    parser.add_argument("--port", type=int, default=0, help="0 for any free port")
    parser.add_argument("--hub", action="append", default=[], metavar="NAME=PARTITIONS")
    parser.add_argument("--address", default="", help=f"also serve port {AMQP_PORT} of this address")
    try:
        asyncio.run(_serve_hubs(parser.parse_args(arguments)))
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve_hubs(options: argparse.Namespace) -> None:
    # Imported only in the child process, so that the parent does not need the AMQP engine.
    from leasehold_lab.standins.hubs.partitions import Hub  # noqa: PLC0415
    from leasehold_lab.standins.hubs.server import serve_hubs  # noqa: PLC0415

    hubs = {}
    for text in options.hub:
        name, _, count = text.partition("=")
        hubs[name.lower()] = Hub.of(name, int(count))
    sas_key = os.environ.get("EVENT_HUBS_KEY")
    other_servers = [await serve_hubs(hubs, sas_key, (options.address, AMQP_PORT))] if options.address else []
    server = await serve_hubs(hubs, sas_key, (HOST, options.port))
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201  read by the parent
    await asyncio.gather(*(listener.serve_forever() for listener in (server, *other_servers)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
