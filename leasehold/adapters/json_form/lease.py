"""The JSON forms of a lease and of a shard, as `leasehold plan` reads them; a lease leaves defaults out."""

import math
from typing import Any

from leasehold.balancer.model import Lease, Shard
from leasehold.stores.fields import kilobytes


def lease_json(lease: Lease) -> dict[str, Any]:
    """The lease as a JSON object; its key, owner, version, idle and checkpoint are always there."""
    return {
        "key": lease.key,
        "owner": lease.owner,
        "version": lease.version,
        "idle": _seconds(lease.idle),
        "checkpoint": lease.checkpoint.sequence,
        **{name: value for name, value in _more(lease).items() if value},
        **({} if lease.weight is None else {"weight": kilobytes(lease.weight)}),
        **({} if math.isinf(lease.held) else {"held": lease.held}),
    }


def shard_json(shard: Shard) -> dict[str, Any]:
    """The shard as a JSON object."""
    hash_range = {} if shard.hash_range is None else {"hash_range": [str(end) for end in shard.hash_range]}
    return {"id": shard.id, "stream": shard.stream, "parents": list(shard.parents), "open": shard.open, **hash_range}


def _more(lease: Lease) -> dict[str, Any]:
    return {
        "sub": lease.checkpoint.sub,
        "token": lease.checkpoint.token,
        "stream": lease.stream,
        "shard": lease.shard if lease.shard != lease.key else "",
        "parents": list(lease.parents),
        "hash_range": [str(end) for end in lease.hash_range or ()],
        "heir": lease.heir,
        "heir_idle": lease.heir_idle,
        "yields": lease.yields,
        "leaving": lease.leaving,
        "epoch": lease.epoch,
        "notes": dict(lease.notes),
    }


def _seconds(idle: float) -> float | None:
    return None if math.isinf(idle) else idle
