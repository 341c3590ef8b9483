"""Shares the shards of a stream among a fleet of workers with nothing between them but a lease table."""

from leasehold.balancer import *  # noqa: F403  the seam, and the values it speaks of
from leasehold.balancer import __all__  # noqa: F401  likewise
