"""Event hubs on this machine, close enough to the service that the real `azure-eventhub` client works with them.

They test the plumbing: that the real client

- opens links, signs in, starts at a checkpoint and keeps to its prefetch,
- sees added partitions,
- loses a link to a newer epoch,
- is rejected with a lower epoch, with none, or with a position after the partition's end,
- and reports detachments.

They cannot test the behavior of the service: throttling, quotas (except for five readers without an epoch per partition
and consumer group), the time at which retention trims, TLS, role-based access, geo-replication, or which partition a
key falls into. Events are kept in memory.

`python -m leasehold_lab.standins.hubs.event_hubs --hub flights=4 --port 0` prints `{"port": …}` and serves until it is
ended. It needs python-qpid-proton. No extra installs that package, because it has to be built with a C compiler and
nothing else in leasehold needs it.

For a hub on a port other than the default, the SDKs use different names in blobs: with the port in Python and Go,
without it in Java and JavaScript. Where their names must agree, hubs also serve the default port, on a loopback address
of their own.
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
from leasehold_lab.standins.node import HOST, Command, Service, serving

KEY_NAME = "local"
SECONDS = 10.0
AMQP_PORT = 5672


@frozen
class LocalHubs:
    """Running hubs.

    Attributes:
        service: The process.
        key: Signs tokens as the service's key would, and is valid for these hubs only.
        address: A loopback address on whose AMQP port they also serve, or "".
    """

    service: Service
    key: str
    address: str = ""

    @property
    def namespace(self) -> str:
        """The host and port, or the address alone, as in blob names and source URLs."""
        return self.address or f"localhost:{self.service.port}"

    def connection_string(self, hub: str = "") -> str:
        """Return the connection string for an SDK, if `hub` is given for that hub only."""
        text = f"Endpoint=sb://{self.namespace};SharedAccessKeyName={KEY_NAME};SharedAccessKey={self.key}"
        # The value must be lower case, because the SDK compares it as a string, and uses TLS for any other value.
        return f"{text};UseDevelopmentEmulator=true" + (f";EntityPath={hub}" if hub else "")

    def create(self, hub: str, partitions: int, groups: tuple[str, ...] = ()) -> None:
        """Create a hub, after deleting any of that name. Without `groups`, every consumer group exists."""
        self._ask(do="create", hub=hub, count=partitions, groups=groups)

    def put(self, hub: str, partition: str, bodies: Iterable[str]) -> None:
        """Enqueue events without a client."""
        self._ask(do="put", hub=hub, partition=partition, bodies=list(bodies))

    def trim(self, hub: str, partition: str, before: int) -> int:
        """Remove the events before this sequence number, as retention does, and return how many there were."""
        return int(self._ask(do="trim", hub=hub, partition=partition, before=before)["trimmed"])

    def add_partitions(self, hub: str, count: int) -> None:
        """Add empty partitions while clients continue to read."""
        self._ask(do="add-partitions", hub=hub, count=count)

    def detach(self, hub: str, partition: str, condition: str = "amqp:link:detach-forced") -> int:
        """End every reader of a partition with this AMQP error, and return how many there were."""
        return int(self._ask(do="detach", hub=hub, partition=partition, condition=condition)["detached"])

    def drop(self, hub: str, partition: str) -> int:
        """Cut the connection of every reader of a partition without notice, and return how many there were."""
        return int(self._ask(do="drop", hub=hub, partition=partition)["dropped"])

    def look(self, hub: str) -> list[dict[str, Any]]:
        """Return for each partition the number of `events`, and `group`, `epoch` and `sent` of its `readers`."""
        return list(self._ask(do="look", hub=hub)["partitions"])

    def _ask(self, **asked: object) -> dict[str, Any]:
        with socket.create_connection((HOST, self.service.port), SECONDS) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile("rb").readline())
        if "error" in answer:
            raise ServiceError(f"event-hubs: {asked.get('do')}: {answer['error']}")
        return answer


def has_engine() -> bool:
    """Return whether the AMQP engine is there. Without a compiler the package silently installs without it."""
    return importlib.util.find_spec("cproton_ffi") is not None


@contextmanager
def event_hubs(hubs: Mapping[str, int], *, key: str = "local-key", address: str = "") -> Iterator[LocalHubs]:
    """Serve hubs with these names and numbers of partitions until the block ends. Every consumer group exists.

    Args:
        hubs: The number of partitions of each hub.
        key: The key that signs tokens.
        address: A loopback address whose AMQP port is free, for SDKs that must agree on the name of the hubs.

    Raises:
        ServiceError: python-qpid-proton is missing, or the process does not start.
    """
    if not has_engine():
        raise ServiceError("local event hubs need pip install cffi python-qpid-proton, where a C compiler is to be had")
    options = [word for name, count in hubs.items() for word in ("--hub", f"{name}={count}")]
    options += ["--address", address] if address else []

    def command(port: int) -> Command:
        start = (sys.executable, "-m", "leasehold_lab.standins.hubs.event_hubs", "--port", str(port))
        return Command((*start, *options), {"EVENT_HUBS_KEY": key})

    with serving("event-hubs", command) as service:
        yield LocalHubs(service, key, address)


def main(arguments: list[str]) -> int:
    """Serve until ended."""
    parser = argparse.ArgumentParser(
        prog="leasehold_lab.standins.hubs.event_hubs", description="Event hubs on this machine."
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--hub", action="append", default=[], metavar="NAME=PARTITIONS")
    parser.add_argument("--address", default="", help=f"serve port {AMQP_PORT} of this one too")
    try:
        asyncio.run(_serve(parser.parse_args(arguments)))
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(options: argparse.Namespace) -> None:
    # Imported only by the child, so that the parent needs no AMQP engine.
    from leasehold_lab.standins.hubs.partitions import Hub  # noqa: PLC0415
    from leasehold_lab.standins.hubs.server import serve  # noqa: PLC0415

    hubs = {}
    for text in options.hub:
        name, _, count = text.partition("=")
        hubs[name.lower()] = Hub.of(name, int(count))
    key = os.environ.get("EVENT_HUBS_KEY")
    others = [await serve(hubs, key, (options.address, AMQP_PORT))] if options.address else []
    server = await serve(hubs, key, (HOST, options.port))
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201  read by the parent
    await asyncio.gather(*(listening.serve_forever() for listening in (server, *others)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
