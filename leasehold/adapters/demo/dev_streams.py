"""The streams and hubs that a developer names, with their URLs and the environment to paste."""

import re
import shlex
from collections.abc import Mapping
from typing import Literal

from attrs import evolve, frozen

SHARDS_MAX = 1000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KINDS: Mapping[str, Literal["kinesis", "eventhubs"]] = {"kinesis": "kinesis", "eventhubs": "eventhubs"}


@frozen
class WantedStream:
    """A stream or hub to make: its name, and how many shards or partitions."""

    name: str
    shards: int
    kind: Literal["kinesis", "eventhubs"] = "kinesis"


@frozen
class DevStream:
    """The URLs of a stream and of a lease table for it.

    source, table        as they stand alone, but for secrets
    pasted, pasted_table after what is to be pasted, where they may be shorter
    """

    source: str
    table: str
    pasted: str
    pasted_table: str


@frozen
class DevServices:
    """The stand-ins that run.

    services     what they stand for
    streams      by name
    environment  what to export, so that URLs need no endpoint and no account is needed
    """

    services: tuple[str, ...]
    streams: Mapping[str, DevStream]
    environment: Mapping[str, str]

    @property
    def exports(self) -> str:
        """The environment as a line for a shell."""
        return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())

    def first(self, name: str) -> "DevServices":
        """The same, with this stream before the others, and its URLs in the environment."""
        chosen = self.streams[name]
        urls = {"SOURCE": chosen.pasted, "STORE": chosen.pasted_table}
        return evolve(self, streams={name: chosen, **self.streams}, environment={**self.environment, **urls})

    def beside(self, other: "DevServices") -> "DevServices":
        """Both of them."""
        return DevServices(
            (*self.services, *other.services),
            {**self.streams, **other.streams},
            {**self.environment, **other.environment},
        )


def wanted(text: str) -> WantedStream:
    """A stream as the command line names it: NAME or NAME=SHARDS, a hub with eventhubs: before. Raises ValueError."""
    before, colon, after = text.rpartition(":")
    name, given, shards = after.partition("=")
    kind = _KINDS.get(before) if colon else "kinesis"
    if kind is None or not _NAME.fullmatch(name):
        raise ValueError(
            f"{text!r} names no stream; write NAME=SHARDS for Kinesis, such as orders=4, or eventhubs:NAME=PARTITIONS"
        )
    if given and not (shards.isascii() and shards.isdigit() and 1 <= int(shards) <= SHARDS_MAX):
        raise ValueError(f"{text!r}: the number of shards is one from 1 to {SHARDS_MAX}, as in {name}=4")
    return WantedStream(name, int(shards) if given else 1, kind)
