"""Takes a JSON document apart, one field at a time; every complaint names the field by its path.

The JSON forms of a lease and of a shard, as `leasehold plan` reads them; a lease leaves defaults out.

The question in the JSON form of the seam: leases, shards, worker and configuration; pure.

Each class has a table: how each of its fields is written. What a class demands, and its defaults, are its own.

The seam as JSON: one document that asks for a plan, and the plan that answers it; pure.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Never, TypeVar, assert_never, get_args, get_origin

from attrs import NOTHING, asdict, define, field, fields, fields_dict, frozen

from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.config import RULE_SETS, Config
from leasehold.balancer.lineage import families, faults
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
from leasehold.balancer.plan import look_again, plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.stores.fields import COUNT_DIGITS, KB, kilobytes
from leasehold.stores.printable import did_you_mean, printable

T = TypeVar("T")

LARGEST = 1e12
"""No number of a plan is larger: seconds, counts and weights of real fleets are far below."""


class BadJsonField(ValueError):
    """A field that is missing, unknown, or holds something else than it should; the text begins with its path."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def parse(text: bytes) -> "JsonValue":
    """Parse a JSON document. Raises BadJsonField where it is none, or where an object says a field twice."""
    try:
        parsed = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except BadJsonField:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJsonField(f"input: not a JSON document ({str(error) or 'nested too deeply'})") from None
    return JsonValue("input", parsed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadJsonField(f"{twice}: given twice in one object")
    return names


def _no_number(text: str) -> Never:
    raise BadJsonField(f"input: {text} is not a JSON number; write null for what is unknown or infinite")


@frozen
class JsonValue:
    """Something found at a path; each method says what it must be. Raises BadJsonField where it is not."""

    path: str
    found: Any

    def bad(self, wanted: str) -> BadJsonField:
        """The complaint that this is not what was wanted."""
        try:
            shown = json.dumps(self.found, default=str)
        except RecursionError:  # it was read a few calls further out
            shown = "a value of a thousand levels"
        return BadJsonField(f"{self.path}: {shown if len(shown) <= 60 else shown[:57] + '...'} is not {wanted}")  # noqa: PLR2004  one line

    def text(self) -> str:
        """A string."""
        if not isinstance(self.found, str):
            raise self.bad("a string")
        return self.found

    def name(self) -> str:
        """A string of at least one character."""
        if not self.text():
            raise self.bad("a name")
        return self.text()

    def one_of(self, *names: str) -> str:
        """The value, which must be among these strings."""
        if not isinstance(self.found, str) or self.found not in names:
            hint = did_you_mean(self.found, names) if isinstance(self.found, str) else ""
            raise self.bad(f"one of {', '.join(names)}{hint}")
        return self.found

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.found, bool):
            raise self.bad("true or false")
        return self.found

    def number(self, least: float = 0.0, most: float = LARGEST) -> float:
        """A finite number."""
        if isinstance(self.found, bool) or not isinstance(self.found, int | float):
            raise self.bad("a number")
        if not least <= self.found <= most:
            raise self.bad(f"between {least:g} and {most:g}")
        return float(self.found)

    def whole(self, least: int = 0, most: float = LARGEST) -> int:
        """A whole number."""
        if isinstance(self.found, bool) or not isinstance(self.found, int):
            raise self.bad("a whole number")
        if not least <= self.found <= most:
            raise self.bad(f"between {least} and {most:g}")
        return self.found

    def decimal(self, most: int) -> int:
        """A whole number written as a decimal string, because JSON numbers may lose digits."""
        text = self.text()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
            raise self.bad(f"a decimal string of at most {most}")
        return int(text)

    def items(self) -> list["JsonValue"]:
        """The elements of a list."""
        if not isinstance(self.found, list):
            raise self.bad("a list")
        return [JsonValue(f"{self.path}[{place}]", each) for place, each in enumerate(self.found)]

    def fields(self) -> "UnreadFields":
        """The fields of an object."""
        if not isinstance(self.found, dict):
            raise self.bad("an object")
        return UnreadFields("" if self.path == "input" else f"{self.path}.", dict(self.found))

    def unless_null(self, read: Callable[["JsonValue"], T], *, null: T) -> T:
        """The value as `read` makes it, or `null` where it is null."""
        return null if self.found is None else read(self)


@define
class UnreadFields:
    """The fields of one object that have not been read yet; `asked` are the names that there may be."""

    prefix: str
    unread: dict[str, Any] = field(factory=dict)
    asked: set[str] = field(factory=set)

    def need(self, name: str) -> JsonValue:
        """A field that must be there."""
        if name not in self.unread:
            raise BadJsonField(f"{self.prefix}{name}: is missing")
        return JsonValue(f"{self.prefix}{name}", self.unread.pop(name))

    def read(self, name: str, read: Callable[[JsonValue], T], default: T) -> T:
        """A field that may be left out."""
        self.asked.add(name)
        return read(self.need(name)) if name in self.unread else default

    def done(self) -> None:
        """Raise BadJsonField for a field that nobody has read."""
        for name in self.unread:
            raise BadJsonField(f"{self.prefix}{name}: unknown field{did_you_mean(name, self.asked)}")


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
    fields.asked.update(forms)
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
        return JsonValue.flag if kind is bool else _question_seconds
    plain: Form = _whole_or_none if kind is int or int in get_args(kind) else lambda value: value.found
    return _list_or(plain) if tuple[str, ...] in get_args(kind) else plain


_names, _question_seconds = _each(JsonValue.name), JsonValue.number
_notes: Callable[[JsonValue], Notes] = _by_name(JsonValue.text)
_name_or_none, _whole_or_none = _or(None, JsonValue.name), _or(None, JsonValue.whole)
_seconds_or_infinite = _or(math.inf, _question_seconds)

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
        "heir_idle": _question_seconds,
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
        "looks_still": _question_seconds,
        "warned": _seconds_or_infinite,
        "turned": JsonValue.flag,
    },
    History: {
        **dict.fromkeys(("owners_still", "fleet_still", "full_still"), _question_seconds),
        **dict.fromkeys(("gaps", "paces"), _by_name(_question_seconds)),
        "led": _by_name(_seconds_or_infinite),
        "holes": _each(_hole),
        "gone": _each(lease_of),
        "full_apart": _seconds_or_infinite,
        "hearing": _or(None, _object(BulletinState)),
    },
    Me: {"worker": JsonValue.name, "turn": JsonValue.whole, "history": _object(History)},
    Config: dict.fromkeys(("lease_seconds", "cycle_seconds", "renew_seconds"), _question_seconds),
    **{each: {option.name: _of_type(option.type) for option in fields(each)} for each in RULE_SETS},
}
"""How the fields of each class are written; made of several fields are a lease's checkpoint, a configuration's rules
and first position, and the stream of a hole, which may be left out."""


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
