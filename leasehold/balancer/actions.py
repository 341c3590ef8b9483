"""Defines the actions that a plan can contain.

There are three ways to obtain a lease. `Claim` takes a free or expired lease, `Steal` takes a lease from a living
owner, and `RequestHandoff` asks a living owner to hand it off.

Each action contains the lease as it was read, and the number of the rule that requires the action. The store rejects an
action if the lease has changed since it was read. A rejection is an expected result and not an error.
"""

from attrs import frozen

from leasehold.balancer.model import Annotations, Lease


@frozen
class Create:
    """Create a lease without an owner, unless the table already has a row with its key.

    Examples:
        >>> from leasehold import Config, Me, Shard, TRIM_HORIZON, plan
        >>> config = Config(initial_position=TRIM_HORIZON)
        >>> [(type(do).__name__, do.lease.key) for do in plan([], [Shard("shard-0")], Me("worker-a"), config)]
        [('Create', 'shard-0')]
    """

    lease: Lease
    rule: str


@frozen
class Renew:
    """Renew a lease to show that its owner is alive.

    The same request also writes `annotations`.

    Examples:
        >>> from leasehold import Config, Lease, Me, plan
        >>> mine = Lease("shard-0", owner="worker-a", idle=6.0)
        >>> [(type(do).__name__, do.lease.key) for do in plan([mine], None, Me("worker-a"), Config())]
        [('Renew', 'shard-0')]
    """

    lease: Lease
    rule: str
    annotations: Annotations = ()


@frozen
class Claim:
    """Take a free or expired lease, provided that its version has not changed.

    If the store rejects the write, the worker tries the actions in `alternates`, in order, until one succeeds.

    Examples:
        >>> from leasehold import Config, Lease, Me, plan
        >>> free = Lease("shard-0")
        >>> [(type(do).__name__, do.lease.key) for do in plan([free], None, Me("worker-a"), Config())]
        [('Claim', 'shard-0')]
    """

    lease: Lease
    rule: str
    alternates: tuple["Taking", ...] = ()


@frozen
class Steal:
    """Take a lease from a living worker, provided that `from_owner` still owns it.

    Examples:
        >>> from leasehold import Config, Kcl, Lease, Me, plan
        >>> theirs = [Lease(f"shard-{n}", owner="worker-b", idle=1.0) for n in range(4)]
        >>> [(type(do).__name__, do.from_owner) for do in plan(theirs, None, Me("worker-a"), Config(rules=Kcl()))]
        [('Steal', 'worker-b')]
    """

    lease: Lease
    from_owner: str
    rule: str
    alternates: tuple["Taking", ...] = ()


@frozen
class RequestHandoff:
    """Ask the living owner of a lease to finish its batch and hand off the lease (H2).

    If `stale_next_owner` is set, the request replaces an old request by the worker of that name.

    If another worker has already requested the lease, this worker tries the actions in `alternates`, in order.

    Examples:
        >>> from leasehold import Lease, RequestHandoff
        >>> theirs = Lease("shard-0", owner="worker-b", yields=True)
        >>> RequestHandoff(theirs, from_owner="worker-b", rule="M6").stale_next_owner is None
        True
    """

    lease: Lease
    from_owner: str
    rule: str
    stale_next_owner: str | None = None
    alternates: tuple["Taking", ...] = ()


@frozen
class Release:
    """Give up one of this worker's leases after its last batch, or free an expired lease of another worker.

    If `next_owner` is set, the lease is handed off to that worker, which has usually requested the lease. If it has not
    (M14), it finds the lease when it next reads the table.

    Examples:
        >>> from leasehold import Lease, Release
        >>> asked = Lease("shard-0", owner="worker-a", next_owner="worker-b")
        >>> Release(asked, rule="H2", next_owner="worker-b").next_owner
        'worker-b'
    """

    lease: Lease
    rule: str
    next_owner: str | None = None


@frozen
class Delete:
    """Remove a lease that nothing depends on any more, because its shard is done or gone from the source (L8, L10).

    Carry out this action only if you have known for longer than `lease_seconds` that the lease is finished, or if the
    source confirms that the shard is gone. `Worker` checks both conditions.

    Examples:
        >>> from leasehold import SHARD_END, Delete, Lease
        >>> Delete(Lease("shard-0", checkpoint=SHARD_END), rule="L8").lease.ended
        True
    """

    lease: Lease
    rule: str


Taking = Claim | Steal | RequestHandoff
"""The actions by which a worker obtains a lease. If the store rejects one of them, the worker may try an alternate."""

Action = Create | Renew | Claim | Steal | RequestHandoff | Release | Delete


@frozen
class Look:
    """Tells a worker when to read the table next, which rows to read, and what to write with renewals until then.

    Attributes:
        seconds: The number of seconds from now until the read.
        keys: The keys of the leases to read, or None to read the whole table.
        annotations: The attributes that renewals should write.
        stale_ok: Whether an eventually consistent read is good enough.

    Examples:
        >>> from leasehold import Config, Lease, Me, look_again
        >>> look = look_again([], [Lease("shard-0", owner="worker-a")], Me("worker-a"), Config())
        >>> look.keys is None  # the whole table
        True
    """

    seconds: float
    keys: tuple[str, ...] | None = None
    annotations: Annotations = ()
    stale_ok: bool = False
