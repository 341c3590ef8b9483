"""The question in the JSON form of the seam: leases, shards, worker and configuration; pure.

Each class has a table: how each of its fields is written. What a class demands, and its defaults, are its own.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from attrs import NOTHING, fields, fields_dict, frozen

from leasehold.adapters.json_form.fields import BadJsonField, JsonValue, UnreadFields, parse
from leasehold.balancer.config import RULE_SETS, Config
from leasehold.balancer.model import (
    HASH_KEYS,
    SENTINELS,
    Bulletin,
    BulletinState,
    HashRange,
    History,
    Hole,
    Lease,
    Me,
    Notes,
    Position,
    Shard,
    at_timestamp,
)
from leasehold.balancer.rule_set import RuleSet
from leasehold.stores.fields import COUNT_DIGITS, KB

T = TypeVar("T")

Form = Callable[[JsonValue], Any]
"""How one field is written."""

RULES: dict[str, type[RuleSet]] = {each.name: each for each in RULE_SETS}

OF_LEASES = ("at", "lags", "malformed", "says", "status", "statuses", "trouble")
"""Fields that `leasehold leases --json` prints beside the leases."""


@frozen
class PlanQuestion:
    """Everything that a plan is made from."""

    leases: tuple[Lease, ...]
    shards: tuple[Shard, ...] | None
    me: Me
    config: Config


def question(text: bytes, worker: str | None = None) -> PlanQuestion:
    """The question of one JSON document. Raises BadJsonField, naming the field.

    worker  who asks, where the document does not say; it may then be a reading that `leasehold leases --json` printed
    """
    fields = parse(text).fields()
    asked = PlanQuestion(
        leases=_each(lease_of)(fields.need("leases")),
        shards=fields.read("shards", _or(None, _each(shard_of)), None),
        me=_object(Me)(fields.need("me")) if worker is None else _named(worker, fields),
        config=fields.read("config", config_of, Config()),
    )
    fields.done()
    _no_twins("leases", "key", (lease.key for lease in asked.leases))
    _no_twins("shards", "id", (shard.id for shard in asked.shards or ()))
    return asked


def _named(worker: str, fields: UnreadFields) -> Me:
    if "me" in fields.unread:
        raise BadJsonField("me: the document says who asks, and so does --worker")
    for name in OF_LEASES:
        fields.unread.pop(name, None)
    return Me(JsonValue("--worker", worker).name())


def _no_twins(path: str, field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            raise BadJsonField(f"{path}[{place}].{field}: {name!r} was given before")
        seen.add(name)


def lease_of(value: JsonValue) -> Lease:
    """Read a lease. Raises BadJsonField, naming the field."""
    fields = value.fields()
    sub, token = fields.read("sub", _count, 0), fields.read("token", JsonValue.text, "")
    position = fields.read("checkpoint", lambda at: _position(at, sub, token), Position("TRIM_HORIZON", sub, token))
    return _built(Lease, fields, checkpoint=position)


def shard_of(value: JsonValue) -> Shard:
    """Read a shard. Raises BadJsonField, naming the field."""
    return _built(Shard, value.fields())


def config_of(value: JsonValue) -> Config:
    """A configuration; the options of the rule set lie flat among the others. Raises BadJsonField, naming the field."""
    fields = value.fields()
    rules = _built(RULES[fields.read("rules", lambda name: name.one_of(*RULES), "minimal")], fields, last=False)
    return _built(Config, fields, rules=rules, initial_position=_initial_position(fields))


def _object(kind: type[T]) -> Callable[[JsonValue], T]:
    return lambda value: _built(kind, value.fields())


def _built(kind: Callable[..., T], fields: UnreadFields, *, last: bool = True, **made: Any) -> T:  # noqa: ANN401  of any kind
    """Build a value of this class from the written fields; `made` was made of several of them.

    last  whether nothing else may be written there
    """
    forms = FORMS[kind]
    for name, attribute in fields_dict(kind).items():  # type: ignore[arg-type]  # mypy takes a class for a function
        if name in forms and (name in fields.unread or attribute.default is NOTHING):
            made[name] = forms[name](fields.need(name))
    if last:
        fields.done()
    try:
        return kind(**made)
    except (TypeError, ValueError) as error:
        raise BadJsonField(f"{fields.prefix}{str(error.args[0]).splitlines()[0]}") from None


def _or(null: object, form: Form) -> Form:
    return lambda value: value.unless_null(form, null=null)


def _each(form: Callable[[JsonValue], T]) -> Callable[[JsonValue], tuple[T, ...]]:
    return lambda value: tuple(form(each) for each in value.items())


def _hole(value: JsonValue) -> Hole:
    fields = value.fields()
    return _built(Hole, fields, stream=fields.read("stream", JsonValue.text, ""))


def _by_name(form: Callable[[JsonValue], T]) -> Callable[[JsonValue], tuple[tuple[str, T], ...]]:
    """The pairs of an object, in order of name."""

    def pairs(value: JsonValue) -> tuple[tuple[str, T], ...]:
        unread = value.fields()
        return tuple((name, form(unread.need(name))) for name in sorted(unread.unread))

    return pairs


def _count(value: JsonValue) -> int:
    """As large as rows may hold; of `sub`, under AT_TIMESTAMP, milliseconds since 1970."""
    return value.whole(most=10**COUNT_DIGITS - 1)


def _position(value: JsonValue, sub: int, token: str) -> Position:
    try:
        return Position(value.text(), sub, token)
    except BadJsonField:
        raise
    except ValueError:
        raise value.bad(f"one of {', '.join(sorted(SENTINELS))} or a decimal string") from None


def _initial_position(fields: UnreadFields) -> Position:
    name = fields.read(
        "initial_position", lambda value: value.one_of("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP"), "LATEST"
    )
    if name == "AT_TIMESTAMP":
        return at_timestamp(fields.need("timestamp_ms").whole(most=2**53))
    return Position(name)


def _hash_key(value: JsonValue) -> int:
    return value.decimal(HASH_KEYS[1])


def _hash_range(value: JsonValue) -> HashRange:
    ends = [_hash_key(each) for each in value.items()]
    if len(ends) != len(HASH_KEYS) or ends[0] > ends[1]:
        raise value.bad("a first and a last hash key, in this order")
    return (ends[0], ends[1])


def _bytes(value: JsonValue) -> int:
    """As rows have it, the form says throughput in KB/s."""
    return round(value.number() * KB)


def _list_or(form: Form) -> Form:
    return lambda value: _names(value) if isinstance(value.found, list) else form(value)


def _of_type(kind: Any) -> Form:  # noqa: ANN401  what a rule set declares
    """An option is written as its declared type says; its rule set checks the rest."""
    if get_origin(kind) is Literal:
        return lambda value: value.one_of(*get_args(kind))
    if kind in {bool, float}:
        return JsonValue.flag if kind is bool else _seconds
    plain: Form = _whole_or_none if kind is int or int in get_args(kind) else lambda value: value.found
    return _list_or(plain) if tuple[str, ...] in get_args(kind) else plain


_names, _seconds = _each(JsonValue.name), JsonValue.number
_notes: Callable[[JsonValue], Notes] = _by_name(JsonValue.text)
_name_or_none, _whole_or_none = _or(None, JsonValue.name), _or(None, JsonValue.whole)
_seconds_or_infinite = _or(math.inf, _seconds)

_STREAM_FORMS: Mapping[str, Form] = {
    "stream": JsonValue.text,
    "parents": _names,
    "hash_range": _or(None, _hash_range),
}

FORMS: Mapping[Any, Mapping[str, Form]] = {
    Lease: {
        **_STREAM_FORMS,
        "key": JsonValue.name,
        "shard": JsonValue.name,
        "owner": _name_or_none,
        "version": JsonValue.text,
        "idle": _seconds_or_infinite,
        "weight": _or(None, _bytes),
        "held": _seconds_or_infinite,
        "heir": _name_or_none,
        "heir_idle": _seconds,
        "yields": JsonValue.flag,
        "leaving": JsonValue.flag,
        "epoch": _count,
        "notes": _notes,
    },
    Shard: {**_STREAM_FORMS, "id": JsonValue.name, "open": JsonValue.flag},
    Hole: {"first": _hash_key, "last": _hash_key, "times": lambda value: value.whole(1)},
    Bulletin: dict.fromkeys(("looks", "acts", "warns"), JsonValue.whole),
    BulletinState: {
        "latest": _object(Bulletin),
        "acts_read": JsonValue.whole,
        "acts_still": _seconds_or_infinite,
        "looks_still": _seconds,
        "warned": _seconds_or_infinite,
        "turned": JsonValue.flag,
    },
    History: {
        **dict.fromkeys(("owners_still", "fleet_still", "full_still"), _seconds),
        **dict.fromkeys(("gaps", "paces"), _by_name(_seconds)),
        "led": _by_name(_seconds_or_infinite),
        "holes": _each(_hole),
        "gone": _each(lease_of),
        "full_apart": _seconds_or_infinite,
        "hearing": _or(None, _object(BulletinState)),
    },
    Me: {"worker": JsonValue.name, "turn": JsonValue.whole, "history": _object(History)},
    Config: dict.fromkeys(("lease_seconds", "cycle_seconds", "renew_seconds"), _seconds),
    **{each: {option.name: _of_type(option.type) for option in fields(each)} for each in RULE_SETS},
}
"""How the fields of each class are written; made of several fields are a lease's checkpoint, a configuration's rules
and first position, and the stream of a hole, which may be left out."""
