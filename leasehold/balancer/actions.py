"""The verbs a plan may speak: a closed union, each with the lease as seen and the rule that asked.

The class is the reason: `Claim` takes what is free or expired, `Steal` what is alive. Each names the lease as it was
read, so that a store can refuse what is no longer true; a refusal is an expected answer, and never an error.
"""

from attrs import frozen

from leasehold.balancer.model import Lease, Notes


@frozen
class Create:
    """Make this lease, which nobody owns yet, unless its key exists.

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
    """Say that the lease's owner is alive; `notes` travel in the same write.

    Examples:
        >>> from leasehold import Config, Lease, Me, plan
        >>> mine = Lease("shard-0", owner="worker-a", idle=6.0)
        >>> [(type(do).__name__, do.lease.key) for do in plan([mine], None, Me("worker-a"), Config())]
        [('Renew', 'shard-0')]
    """

    lease: Lease
    rule: str
    notes: Notes = ()


@frozen
class Claim:
    """Take a free or expired lease, under the version as seen.

    If the write is refused, the alternates are tried in turn until one succeeds.

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
    """Take a lease from its living owner, under the owner as seen.

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
    """Ask the living owner to drain and hand over (H2); replaces a stale heir if one is named.

    If somebody else was faster, the alternates are asked for in turn.

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
    """Give up a lease: mine after draining, to its heir where one is named; or an expired one, for all.

    An heir that the lease itself does not name asked for nothing: it finds the lease by its own reading (M14).

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
    """Remove a lease that nothing depends on any more: its shard is done, or gone from the source (L8, L10).

    Examples:
        >>> from leasehold import SHARD_END, Delete, Lease
        >>> Delete(Lease("shard-0", checkpoint=SHARD_END), rule="L8").lease.ended
        True
    """

    lease: Lease
    rule: str


Taking = Claim | Steal | RequestHandoff
"""Each of these is a way to come by a lease; where one is refused, another may follow."""

Action = Create | Renew | Claim | Steal | RequestHandoff | Release | Delete


@frozen
class Look:
    """A look says when to look next (seconds from now), at which leases (None: all), and what renewals should carry.

    stale_ok  whether those leases may be read as they were a moment ago

    Examples:
        >>> from leasehold import Config, Lease, Me, look_again
        >>> look_again([], [Lease("shard-0", owner="worker-a")], Me("worker-a"), Config()).keys is None  # all of them
        True
    """

    seconds: float
    keys: tuple[str, ...] | None = None
    notes: Notes = ()
    stale_ok: bool = False
