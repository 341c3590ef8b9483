"""Says which other workers renew too slowly for our `lease_seconds`: their fleet is set to other seconds than ours."""

import logging

from balancer.census import slow_owners
from balancer.config import Config
from balancer.model import Me

log = logging.getLogger("leasehold.worker")


class SlowPeers:
    """Speaks of each worker once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def heed(self, me: Me, config: Config) -> None:
        """Look at the gaps measured so far; `plan` spares these workers by the same figures."""
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
                    3 * gap,
                )
