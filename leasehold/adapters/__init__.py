"""Provides workers, sources and commands. To run a complete consumer, use `leasehold.run`.

The names below are imported only when they are first used, so that commands that run no worker start quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leasehold.adapters.consumer.dead_letters.sinks import dead_letters
    from leasehold.adapters.consumer.handling import Assignment, Delivery, Handling, ShardConsumer, by_key
    from leasehold.adapters.consumer.runner import Runner
    from leasehold.adapters.sources.urls import open_source
    from leasehold.adapters.worker.worker import Worker

__all__ = [
    "Assignment",
    "Delivery",
    "Handling",
    "Runner",
    "ShardConsumer",
    "Worker",
    "by_key",
    "dead_letters",
    "open_source",
]

_HOMES = {
    "Assignment": "consumer.handling",
    "Delivery": "consumer.handling",
    "Handling": "consumer.handling",
    "Runner": "consumer.runner",
    "ShardConsumer": "consumer.handling",
    "Worker": "worker.worker",
    "by_key": "consumer.handling",
    "dead_letters": "consumer.dead_letters.sinks",
    "open_source": "sources.urls",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__"]
