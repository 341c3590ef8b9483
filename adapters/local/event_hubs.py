"""Event hubs on this machine, close enough that the real `azure-eventhub` client works against them.

It proves plumbing: that the real client opens links, signs in, starts where a checkpoint says, keeps
to its prefetch, sees added partitions, loses a link to a newer epoch, and reports detachments.
It cannot prove the service's own behaviour: throttling, quotas (but for five readers without an epoch
of one partition in a consumer group), retention, TLS, role-based access, geo-replication,
how a *lower* epoch is turned away, or which partition a key falls into. Events live in memory.

`python -m adapters.local.event_hubs --hub flights=4 --port 0` prints `{"port": …}` and serves until
ended. It needs python-qpid-proton, which the tests bring; nothing else of leasehold does.
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
from pathlib import Path
from typing import Any

from attrs import frozen

from adapters.local.process import HOST, Command, Service, ServiceError, serving

KEY_NAME = "local"
ROOT = Path(__file__).parents[2]
SECONDS = 10.0


@frozen
class EventHubs:
    """Running hubs. The key signs tokens as the service's would, and opens nothing but these hubs."""

    service: Service
    key: str

    @property
    def namespace(self) -> str:
        """Host and port, as they stand in blob names and source URLs."""
        return f"localhost:{self.service.port}"

    def connection_string(self, hub: str = "") -> str:
        """What the SDK wants to hear; with a hub named, for that hub alone."""
        text = f"Endpoint=sb://{self.namespace};SharedAccessKeyName={KEY_NAME};SharedAccessKey={self.key}"
        # The value must be lower case: the SDK compares it as text, and speaks TLS to any other.
        return f"{text};UseDevelopmentEmulator=true" + (f";EntityPath={hub}" if hub else "")

    def create(self, hub: str, partitions: int, groups: tuple[str, ...] = ()) -> None:
        """One more hub; with no groups named, any consumer group will do."""
        self._ask(do="create", hub=hub, count=partitions, groups=groups)

    def put(self, hub: str, partition: str, bodies: Iterable[str]) -> None:
        """Enqueue events without the trouble of a client."""
        self._ask(do="put", hub=hub, partition=partition, bodies=list(bodies))

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


@contextmanager
def event_hubs(hubs: Mapping[str, int], *, groups: tuple[str, ...] = (), key: str = "local-key") -> Iterator[EventHubs]:
    """Hubs of these names with so many partitions each, until the block ends.

    groups names the consumer groups there are; with none, any will do. Raises ServiceError if
    python-qpid-proton is missing or the process does not start.
    """
    # Where it finds no compiler the package installs without its engine, and says nothing.
    if importlib.util.find_spec("cproton_ffi") is None:
        raise ServiceError("local event hubs need python-qpid-proton, installed where a C compiler is to be had")
    named = [word for name, count in hubs.items() for word in ("--hub", f"{name}={count}")]
    named += [word for group in groups for word in ("--group", group)]

    def command(port: int) -> Command:
        start = (sys.executable, "-m", "adapters.local.event_hubs", "--port", str(port))
        return Command((*start, *named), {"PYTHONPATH": str(ROOT), "EVENT_HUBS_KEY": key})

    with serving("event-hubs", command) as service:
        yield EventHubs(service, key)


def main(arguments: list[str]) -> int:
    """Serve until ended."""
    options = _options(arguments)
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        return 130
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="adapters.local.event_hubs", description="Local event hubs for tests.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--hub", action="append", default=[], metavar="NAME=PARTITIONS")
    parser.add_argument("--group", action="append", default=[], help="a consumer group; without any, all are known")
    return parser.parse_args(arguments)


async def _serve(options: argparse.Namespace) -> None:
    # Imported by the child alone, so that whoever starts it needs no AMQP engine.
    from adapters.local.hub_partitions import Hub  # noqa: PLC0415
    from adapters.local.hub_server import serve  # noqa: PLC0415

    hubs = {}
    for text in options.hub:
        name, _, count = text.partition("=")
        hubs[name.lower()] = Hub.of(name, int(count), options.group)
    server = await serve(hubs, os.environ.get("EVENT_HUBS_KEY"), HOST, options.port)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)  # noqa: T201  the promised line
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
