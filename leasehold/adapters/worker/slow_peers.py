"""Logs which other workers renew too slowly for our `lease_seconds`: they are set to other seconds than we are."""

import logging

from leasehold.balancer.config import Config
from leasehold.balancer.counting import patience_with, slow_owners
from leasehold.balancer.model import Me
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.worker"))


class SlowPeers:
    """Logs each slow worker once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def observe(self, me: Me, config: Config) -> None:
        """Log the workers whose measured gaps are too long; `plan` waits longer for them by the same figures."""
        for owner, gap in slow_owners(me, config):
            if owner not in self._said:
                self._said.add(owner)
                log.warning(
                    "worker %s let %.1f s pass between two renewals, too long for our lease_seconds of %g; it counts "
                    "as dead after %.1f s only. Give all workers of the group the same: --lease-seconds here, "
                    "failoverTimeMillis in the KCL, partition_ownership_expiration_interval in azure-eventhub",
                    owner,
                    gap,
                    config.lease_seconds,
                    patience_with(gap, config),
                )
