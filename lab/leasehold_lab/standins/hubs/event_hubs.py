"""Event hubs on this machine, close enough that the real `azure-eventhub` client works against them.

It proves plumbing: that the real client opens links, signs in, starts where a checkpoint says, keeps
to its prefetch, sees added partitions, loses a link to a newer epoch, is turned away with a lower one or
none, or with a place behind the partition's end, and reports detachments.
It cannot prove the service's own behaviour: throttling, quotas (but for five readers without an epoch
of one partition in a consumer group), when retention trims, TLS, role-based access, geo-replication,
or which partition a key falls into. Events live in memory.

`python -m leasehold_lab.standins.hubs.event_hubs --hub flights=4 --port 0` prints `{"port": …}` and serves until
ended. It needs python-qpid-proton, which no extra brings: that is built where a C compiler is to be had, and nothing
else of leasehold needs it.

The SDKs name a hub that has a port of its own differently in blobs: with the port in Python and Go, without it in Java
and JavaScript. Where they are to meet, hubs also serve the port that all assume, on a loopback address of their own.
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
    """Running hubs. The key signs tokens as the service's would, and opens nothing but these hubs.

    address  a loopback address on whose AMQP port they serve too, or ""
    """

    service: Service
    key: str
    address: str = ""

    @property
    def namespace(self) -> str:
        """Host and port, or the address alone, as they stand in blob names and source URLs."""
        return self.address or f"localhost:{self.service.port}"

    def connection_string(self, hub: str = "") -> str:
        """The connection string for an SDK; with a hub named, for that hub alone."""
        text = f"Endpoint=sb://{self.namespace};SharedAccessKeyName={KEY_NAME};SharedAccessKey={self.key}"
        # The value must be lower case: the SDK compares it as text, and speaks TLS to any other.
        return f"{text};UseDevelopmentEmulator=true" + (f";EntityPath={hub}" if hub else "")

    def create(self, hub: str, partitions: int, groups: tuple[str, ...] = ()) -> None:
        """Add a hub; with no groups named, any consumer group will do. One of that name is deleted first."""
        self._ask(do="create", hub=hub, count=partitions, groups=groups)

    def put(self, hub: str, partition: str, bodies: Iterable[str]) -> None:
        """Enqueue events without the trouble of a client."""
        self._ask(do="put", hub=hub, partition=partition, bodies=list(bodies))

    def trim(self, hub: str, partition: str, before: int) -> int:
        """Forget the events before this sequence number, as retention does; how many there were."""
        return int(self._ask(do="trim", hub=hub, partition=partition, before=before)["trimmed"])

    def add_partitions(self, hub: str, count: int) -> None:
        """Add empty partitions while everybody goes on reading."""
        self._ask(do="add-partitions", hub=hub, count=count)

    def detach(self, hub: str, partition: str, condition: str = "amqp:link:detach-forced") -> int:
        """End every reader of a partition with this AMQP error; how many there were."""
        return int(self._ask(do="detach", hub=hub, partition=partition, condition=condition)["detached"])

    def drop(self, hub: str, partition: str) -> int:
        """Cut the connections of every reader of a partition without a word; how many there were."""
        return int(self._ask(do="drop", hub=hub, partition=partition)["dropped"])

    def look(self, hub: str) -> list[dict[str, Any]]:
        """For each partition, how many `events` it has, and `group`, `epoch` and `sent` of its `readers`."""
        return list(self._ask(do="look", hub=hub)["partitions"])

    def _ask(self, **asked: object) -> dict[str, Any]:
        with socket.create_connection((HOST, self.service.port), SECONDS) as line:
            line.sendall(json.dumps(asked).encode() + b"\n")
            answer: dict[str, Any] = json.loads(line.makefile("rb").readline())
        if "error" in answer:
            raise ServiceError(f"event-hubs: {asked.get('do')}: {answer['error']}")
        return answer


def has_engine() -> bool:
    """Whether the AMQP engine is there: without a compiler the package installs itself without it, and says nothing."""
    return importlib.util.find_spec("cproton_ffi") is not None


@contextmanager
def event_hubs(hubs: Mapping[str, int], *, key: str = "local-key", address: str = "") -> Iterator[LocalHubs]:
    """Hubs of these names with so many partitions each, until the block ends; any consumer group will do.

    address is a loopback address whose AMQP port is free, for SDKs that are to agree on the hubs' name. Raises
    ServiceError if python-qpid-proton is missing or the process does not start.
    """
    if not has_engine():
        raise ServiceError("local event hubs need pip install cffi python-qpid-proton, where a C compiler is to be had")
    named = [word for name, count in hubs.items() for word in ("--hub", f"{name}={count}")]
    named += ["--address", address] if address else []

    def command(port: int) -> Command:
        start = (sys.executable, "-m", "leasehold_lab.standins.hubs.event_hubs", "--port", str(port))
        return Command((*start, *named), {"EVENT_HUBS_KEY": key})

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
    # Imported by the child alone, so that whoever starts it needs no AMQP engine.
    from leasehold_lab.standins.hubs.partitions import Hub  # noqa: PLC0415
    from leasehold_lab.standins.hubs.server import serve  # noqa: PLC0415

    hubs = {}
    for text in options.hub:
        name, _, count = text.partition("=")
        hubs[name.lower()] = Hub.of(name, int(count))
    key = os.environ.get("EVENT_HUBS_KEY")
    others = [await serve(hubs, key, (options.address, AMQP_PORT))] if options.address else []
    server = await serve(hubs, key, (HOST, options.port))
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201  the promised line
    await asyncio.gather(*(each.serve_forever() for each in (server, *others)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
