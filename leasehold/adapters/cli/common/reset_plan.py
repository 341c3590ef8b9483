"""A reset as a file: what `leasehold reset --dry-run --json` printed, held against the table and carried out."""

from collections import Counter
from collections.abc import Collection, Iterable

from attrs import frozen

from leasehold.adapters.cli.common.checkpoint_moves import said
from leasehold.adapters.json_form.fields import BadJsonField, JsonValue, parse
from leasehold.adapters.json_form.question import lease_of
from leasehold.adapters.steering.checkpoints.moves import Move
from leasehold.adapters.steering.checkpoints.resetting import planned
from leasehold.balancer.model import Lease, Position


@frozen
class PlannedReset:
    """A lease of a plan: where it stood when the plan was made, and where it is to be set."""

    key: str
    was: Position
    wanted: Position


def read_plan(text: bytes) -> tuple[PlannedReset, ...]:
    """The leases of a plan. Raises ValueError, naming the field that is not as `--dry-run --json` prints it."""
    try:
        resets = tuple(_planned(value) for value in parse(text).fields().need("leases").items())
    except BadJsonField as error:
        raise ValueError(f"--plan: {error}") from None
    if twice := sorted(key for key, times in Counter(each.key for each in resets).items() if times > 1):
        raise ValueError(f"--plan: lease {twice[0]!r} is given twice")
    return resets


def moves_of(plan: Iterable[PlannedReset], leases: Iterable[Lease], live: Collection[str]) -> tuple[Move, ...]:
    """The moves of a plan; refused where the lease has moved since. Raises ValueError for a lease that is not there."""
    known = {lease.key: lease for lease in leases}
    moves: list[Move] = []
    for each in plan:
        if each.key not in known:
            raise ValueError(f"--plan: there is no lease {each.key!r}; is it the plan of another store?")
        (move,) = planned((known[each.key],), each.wanted, live)
        stands = known[each.key].checkpoint
        moved = f"it stands at {said(stands)}, no longer at {said(each.was)}; make the plan anew"
        moves.append(move if stands in {each.was, each.wanted} else move.refused(moved))
    return tuple(moves)


def _planned(value: JsonValue) -> PlannedReset:
    fields = value.fields()
    return PlannedReset(fields.need("key").name(), _at(fields.need("was")), _at(fields.need("wanted")))


def _at(value: JsonValue) -> Position:
    """A position, by the fields that a lease has."""
    value.fields().need("checkpoint")
    return lease_of(JsonValue(value.path, {"key": "-", **value.found})).checkpoint
