"""What the JSON form of the seam asks: leases, shards, worker and configuration; pure."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from attrs import fields_dict, frozen

from adapters.json_fields import BadField, Fields, Value, parse
from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal, Rules
from balancer.model import (
    HASH_KEYS,
    SENTINELS,
    HashRange,
    History,
    Hole,
    Lease,
    Me,
    Notes,
    Position,
    Shard,
    Version,
    at_timestamp,
)

T = TypeVar("T")

RULES: dict[str, type[Rules]] = {"kcl": Kcl, "kcl-rust": KclRust, "event-hubs": EventHubs, "minimal": Minimal}


@frozen
class Question:
    """Everything that a plan is made from."""

    leases: tuple[Lease, ...]
    shards: tuple[Shard, ...] | None
    me: Me
    config: Config


def question(text: bytes) -> Question:
    """What one JSON document asks. Raises BadField, naming the field."""
    fields = parse(text).fields()
    asked = Question(
        leases=tuple(lease_of(each) for each in fields.need("leases").items()),
        shards=fields.read("shards", lambda value: value.unless_null(_shards, null=None), None),
        me=_me(fields.need("me")),
        config=fields.read("config", config_of, Config()),
    )
    fields.done()
    _no_twins("leases", "key", (lease.key for lease in asked.leases))
    _no_twins("shards", "id", (shard.id for shard in asked.shards or ()))
    return asked


def _no_twins(path: str, field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            raise BadField(f"{path}[{place}].{field}: {name!r} was given before")
        seen.add(name)


def lease_of(value: Value) -> Lease:
    """One lease. Raises BadField, naming the field."""
    fields = value.fields()
    key = fields.need("key").name()
    lease = Lease(
        key=key,
        stream=fields.read("stream", Value.text, ""),
        shard=fields.read("shard", Value.name, key),
        parents=fields.read("parents", _names, ()),
        owner=fields.read("owner", _name_or_none, None),
        version=Version(fields.read("version", Value.text, "")),
        idle=fields.read("idle", _seconds_or_infinite, 0.0),
        checkpoint=_checkpoint(fields),
        hash_range=fields.read("hash_range", _hash_range, None),
        weight=fields.read("weight", lambda value: value.unless_null(Value.number, null=None), None),
        held=fields.read("held", _seconds_or_infinite, math.inf),
        heir=fields.read("heir", _name_or_none, None),
        heir_idle=fields.read("heir_idle", Value.number, 0.0),
        yields=fields.read("yields", Value.flag, False),
        leaving=fields.read("leaving", Value.flag, False),
        epoch=fields.read("epoch", Value.whole, 0),
        notes=fields.read("notes", _notes, ()),
    )
    fields.done()
    return lease


def _shards(value: Value) -> tuple[Shard, ...]:
    return tuple(_shard(each) for each in value.items())


def _shard(value: Value) -> Shard:
    fields = value.fields()
    shard = Shard(
        id=fields.need("id").name(),
        stream=fields.read("stream", Value.text, ""),
        parents=fields.read("parents", _names, ()),
        hash_range=fields.read("hash_range", _hash_range, None),
        open=fields.read("open", Value.flag, True),
    )
    fields.done()
    return shard


def _me(value: Value) -> Me:
    fields = value.fields()
    me = Me(
        worker=fields.need("worker").name(),
        turn=fields.read("turn", Value.whole, 0),
        history=fields.read("history", _history, History()),
    )
    fields.done()
    return me


def _history(value: Value) -> History:
    fields = value.fields()
    history = History(
        owners_still=fields.read("owners_still", Value.number, 0.0),
        fleet_still=fields.read("fleet_still", Value.number, 0.0),
        holes=fields.read("holes", lambda value: tuple(_hole(each) for each in value.items()), ()),
        gaps=fields.read("gaps", _seconds_by_worker, ()),
        led=fields.read("led", _seconds_by_worker, ()),
    )
    fields.done()
    return history


def _hole(value: Value) -> Hole:
    fields = value.fields()
    hole = Hole(
        stream=fields.read("stream", Value.text, ""),
        first=fields.need("first").decimal(HASH_KEYS[1]),
        last=fields.need("last").decimal(HASH_KEYS[1]),
        times=fields.need("times").whole(1),
    )
    fields.done()
    return hole


def _seconds_by_worker(value: Value) -> tuple[tuple[str, float], ...]:
    unread = value.fields()
    return tuple((owner, unread.need(owner).number()) for owner in sorted(unread.unread))


def _checkpoint(fields: Fields) -> Position:
    sub = fields.read("sub", Value.whole, 0)
    token = fields.read("token", Value.text, "")
    return fields.read("checkpoint", lambda value: _position(value, sub, token), Position("TRIM_HORIZON", sub, token))


def _position(value: Value, sub: int, token: str) -> Position:
    try:
        return Position(value.text(), sub, token)
    except BadField:
        raise
    except ValueError:
        raise value.bad(f"one of {', '.join(sorted(SENTINELS))} or a decimal string") from None


def _seconds_or_infinite(value: Value) -> float:
    return value.unless_null(Value.number, null=math.inf)


def _name_or_none(value: Value) -> str | None:
    return value.unless_null(Value.name, null=None)


def _names(value: Value) -> tuple[str, ...]:
    return tuple(each.name() for each in value.items())


def _notes(value: Value) -> Notes:
    unread = value.fields()
    return tuple((name, unread.need(name).text()) for name in sorted(unread.unread))


def _hash_range(value: Value) -> HashRange | None:
    if value.found is None:
        return None
    ends = [each.decimal(HASH_KEYS[1]) for each in value.items()]
    if len(ends) != len(HASH_KEYS) or ends[0] > ends[1]:
        raise value.bad("a first and a last hash key, in this order")
    return (ends[0], ends[1])


def config_of(value: Value) -> Config:
    """A configuration; the options of the rule set lie flat among the others. Raises BadField, naming the field."""
    fields = value.fields()
    rules = _rules(fields)
    given: dict[str, Any] = {}
    for name in ("lease_seconds", "cycle_seconds", "renew_seconds"):
        if name in fields.unread:
            given[name] = fields.need(name).number()
    given["initial_position"] = _initial_position(fields)
    fields.done()
    return _built(Config, fields.prefix, rules=rules, **given)


def _rules(fields: Fields) -> Rules:
    name = fields.read("rules", lambda value: value.one_of(*RULES), "minimal")
    options = {
        option: _option(option)(fields.need(option)) for option in fields_dict(RULES[name]) if option in fields.unread
    }
    kind: Callable[..., Rules] = RULES[name]
    return _built(kind, fields.prefix, **options)


def _option(name: str) -> Callable[[Value], Any]:  # noqa: PLR0911  one for each way of writing
    """How this option is written; its limits are the configuration's own."""
    match name:
        case "groups":
            return lambda value: _names(value) if isinstance(value.found, list) else value.found
        case "expected_workers":
            return lambda value: _names(value) if isinstance(value.found, list) else _whole_or_none(value)
        case "release":
            return Value.flag
        case "dialect":
            return lambda value: value.one_of("gist", "dotnet", "java", "python")
        case "mode":
            return lambda value: value.one_of("balanced", "greedy")
        case "grace_seconds":
            return Value.number
        case _:
            return _whole_or_none


def _whole_or_none(value: Value) -> int | None:
    return value.unless_null(Value.whole, null=None)


def _built(kind: Callable[..., T], path: str, **given: Any) -> T:  # noqa: ANN401  options of several kinds
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise BadField(f"{path}{str(error.args[0]).splitlines()[0]}") from None


def _initial_position(fields: Fields) -> Position:
    name = fields.read(
        "initial_position", lambda value: value.one_of("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP"), "LATEST"
    )
    if name == "AT_TIMESTAMP":
        return at_timestamp(fields.need("timestamp_ms").whole(most=2**53))
    return Position(name)
