"""The seconds of a fleet that reads Event Hubs: official workers may be in its group, and are slow by design."""

from collections.abc import Container
from typing import Any

from attrs import evolve

from leasehold.balancer.config import Config

LEASE_SECONDS = 120.0
"""Seconds after which most official workers take an ownership; Python's, after the 180 of its own rules."""

CYCLE_SECONDS = 30.0
"""How often most of them look."""

RENEW_SECONDS = 20.0
"""JavaScript's and Go's expire after 60 s, whatever this fleet is set to."""


def paced(config: Config, given: Container[str]) -> Config:
    """Return this configuration, with the seconds that were not `given` as they suit a group of official workers."""
    seconds = config.lease_seconds if "lease_seconds" in given else max(LEASE_SECONDS, config.rules.lease_seconds)
    usual = Config(rules=config.rules, lease_seconds=seconds)
    suited: dict[str, Any] = {
        "lease_seconds": seconds,
        "cycle_seconds": min(CYCLE_SECONDS, usual.cycle_seconds),
        "renew_seconds": min(RENEW_SECONDS, usual.renew_seconds),
    }
    return evolve(config, **{name: value for name, value in suited.items() if name not in given})
