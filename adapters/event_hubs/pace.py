"""The seconds of a fleet that reads Event Hubs: official workers may be in its group, and are slow by design."""

from collections.abc import Container
from typing import Any

from attrs import evolve

from balancer.config import Config, EventHubs

LEASE_SECONDS, LEASE_SECONDS_PYTHON = 120.0, 180.0
"""After which the official workers take an ownership: .NET and Java, and Python."""

CYCLE_SECONDS = 30.0
"""How often most of them look."""

RENEW_SECONDS = 20.0
"""JavaScript's and Go's expire after 60 s, whatever this fleet is set to."""


def paced(config: Config, given: Container[str]) -> Config:
    """The same, with the seconds that were not `given` as they suit a group of official workers."""
    seconds = config.lease_seconds if "lease_seconds" in given else _lease_seconds(config)
    usual = Config(rules=config.rules, lease_seconds=seconds)
    suited: dict[str, Any] = {
        "lease_seconds": seconds,
        "cycle_seconds": min(CYCLE_SECONDS, usual.cycle_seconds),
        "renew_seconds": min(RENEW_SECONDS, usual.renew_seconds),
    }
    return evolve(config, **{name: value for name, value in suited.items() if name not in given})


def _lease_seconds(config: Config) -> float:
    python = isinstance(config.rules, EventHubs) and config.rules.dialect == "python"
    return LEASE_SECONDS_PYTHON if python else LEASE_SECONDS
