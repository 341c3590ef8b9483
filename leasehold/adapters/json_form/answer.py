"""The seam as JSON: one document that asks for a plan, and the plan that answers it; pure."""

from collections.abc import Iterable
from typing import Any, assert_never

from attrs import asdict

from leasehold.adapters.json_form.question import question
from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.model import Lease, Shard
from leasehold.balancer.plan import look_again, plan
from leasehold.balancer.shards.ancestry import families, faults


def answer(text: bytes, worker: str | None = None) -> dict[str, Any]:
    """The plan for one JSON document. Raises BadJsonField, naming the field, for anything but a well-formed one.

    worker  who asks, where the document is a reading that `leasehold leases --json` printed
    """
    asked = question(text, worker)
    actions = plan(asked.leases, asked.shards, asked.me, asked.config)
    look = look_again(actions, asked.leases, asked.me, asked.config)
    return {
        "actions": [action_json(action) for action in actions],
        **_look_json(look),
        **_problems_json(asked.shards or ()),
    }


def action_json(action: Action) -> dict[str, Any]:
    """The action as JSON; `from` is the owner that loses the lease, `to` the one that is to get it."""
    return {"do": _VERBS[type(action)], "key": action.lease.key, "rule": action.rule} | _more_json(action)


def _more_json(action: Action) -> dict[str, Any]:
    match action:
        case Create():
            return _lease_json(action.lease)
        case Steal():
            return {"from": action.victim} | _alternates_json(action.alternates)
        case Claim():
            return _alternates_json(action.alternates)
        case RequestHandoff():
            return {"from": action.victim} | _if("stale_heir", action.stale_heir) | _alternates_json(action.alternates)
        case Release():
            return _if("to", action.heir)
        case Renew():
            return _if("notes", dict(action.notes))
        case Delete():
            return {}
        case _:
            assert_never(action)


_VERBS = {
    Create: "create",
    Renew: "renew",
    Claim: "claim",
    Steal: "steal",
    RequestHandoff: "request-handoff",
    Release: "release",
    Delete: "delete",
}


def _if(name: str, value: object) -> dict[str, Any]:
    return {name: value} if value else {}


def _alternates_json(alternates: Iterable[Action]) -> dict[str, Any]:
    return _if("alternates", [action_json(other) for other in alternates])


def _lease_json(lease: Lease) -> dict[str, Any]:
    start = lease.checkpoint
    at_time = {"timestamp_ms": start.sub} if start.sequence == "AT_TIMESTAMP" else {}
    stream = _if("stream", lease.stream)
    return {"checkpoint": start.sequence, "parents": list(lease.parents)} | at_time | stream


def _look_json(look: Look) -> dict[str, Any]:
    keys = {} if look.keys is None else {"look_again_keys": list(look.keys)}
    more = _if("look_again_notes", dict(look.notes)) | _if("look_again_stale_ok", look.stale_ok)
    return {"look_again_seconds": look.seconds} | keys | more


def _problems_json(shards: Iterable[Shard]) -> dict[str, Any]:
    """The problems for which no leases of a stream are created (L2): without them the reason would be unknown."""
    return _if("problems", [asdict(problem) for family in families(shards) for problem in faults(family)])
