"""Shares the shards of a stream among a group of workers that coordinate only through a lease table.

Importing this package imports the planner. The names for consuming a stream (`run`, `read` …) are imported on first
use, so that a program that uses only the planner does not load the rest.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    from leasehold.balancer import (
        LATEST,
        SHARD_END,
        TRIM_HORIZON,
        Action,
        Claim,
        Config,
        Create,
        Delete,
        EventHubs,
        Kcl,
        KclRust,
        Lease,
        Look,
        Me,
        Minimal,
        Position,
        Problem,
        Release,
        Renew,
        RequestHandoff,
        Shard,
        Steal,
        Watch,
        at_timestamp,
        look_again,
        plan,
        problems,
        renewals,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing}: leasehold is here without what it needs, as where Spark's --py-files ships it; ship an "
        "environment with 'leasehold[spark]' (venv-pack and --archives, see docs/spark-cluster.md), or install it "
        "everywhere",
        name=missing.name,
    ) from None
from leasehold.errors import (
    DeadLetterError,
    LeaseholdError,
    NotWritten,
    OutcomeUnknown,
    ProducerError,
    RecordFailed,
    RecordLate,
    SourceError,
    SourceUnavailable,
    StoreError,
    Trimmed,
    WorkerError,
)

if _TYPE_CHECKING:
    from leasehold.adapters.api import arun, produce, read, run, worker
    from leasehold.adapters.consumer.handling import Delivery
    from leasehold.adapters.sources.protocol import Record

    __version__: str

_HOMES = {
    "Delivery": "adapters.consumer.handling",
    "Record": "adapters.sources.protocol",
    "arun": "adapters.api",
    "produce": "adapters.api",
    "read": "adapters.api",
    "run": "adapters.api",
    "worker": "adapters.api",
}

__all__ = ["Delivery", "Record", "arun", "produce", "read", "run", "worker"]
__all__ += [
    "DeadLetterError",
    "LeaseholdError",
    "NotWritten",
    "OutcomeUnknown",
    "ProducerError",
    "RecordFailed",
    "RecordLate",
    "SourceError",
    "SourceUnavailable",
    "StoreError",
    "Trimmed",
    "WorkerError",
]
__all__ += [
    "LATEST",
    "SHARD_END",
    "TRIM_HORIZON",
    "Action",
    "Claim",
    "Config",
    "Create",
    "Delete",
    "EventHubs",
    "Kcl",
    "KclRust",
    "Lease",
    "Look",
    "Me",
    "Minimal",
    "Position",
    "Problem",
    "Release",
    "Renew",
    "RequestHandoff",
    "Shard",
    "Steal",
    "Watch",
    "at_timestamp",
    "look_again",
    "plan",
    "problems",
    "renewals",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _import_module("importlib.metadata").version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = globals()[name] = getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name[:1] != "_"), "__doc__", "__version__"})
