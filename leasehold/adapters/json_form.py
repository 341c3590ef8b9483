"""The seam as JSON: one document that asks for a plan, and the plan that answers it; pure.

`JsonValue` takes a document apart, one field at a time; every complaint names the field by its path. `lease_json` and
`shard_json` write leases and shards as `leasehold plan` reads them; a lease leaves defaults out. `question` reads what
is asked: leases, shards, worker and configuration. Each class has a table: how each of its fields is written. What a
class demands, and its defaults, are its own.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Never, TypeVar, assert_never, get_args, get_origin

from attrs import NOTHING, asdict, define, field, fields, fields_dict, frozen

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.family import families, faults
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
from leasehold.plugins import known_rule_sets
from leasehold.stores.fields import COUNT_DIGITS, FIELDS, KB, CellKind, cells
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

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise BadJsonField(f"{twice}: given twice in one object")
        return names

    def no_number(text: str) -> Never:
        raise BadJsonField(f"input: {text} is not a JSON number; write null for what is unknown or infinite")

    try:
        parsed = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except BadJsonField:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJsonField(f"input: not a JSON document ({str(error) or 'nested too deeply'})") from None
    return JsonValue("input", parsed)


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


_ALWAYS = ("key", "owner", "version", "idle", "checkpoint")
_UNLESS_DEFAULT = (
    *("sub", "token", "stream", "shard", "parents", "hash_range", "next_owner", "next_owner_idle", "yields"),
    *("leaving", "epoch", "notes", "weight", "held"),
)
_DEFAULTS = cells(Lease(""))

JSON_NAMES = {"next_owner": "heir", "next_owner_idle": "heir_idle"}
"""Fields of a lease that the JSON form calls by another name."""


def lease_json(lease: Lease) -> dict[str, Any]:
    """The lease as a JSON object; its key, owner, version, idle and checkpoint are always there."""
    told = cells(lease)
    default = _DEFAULTS | {"shard": lease.key}
    return {name: told[name] for name in _ALWAYS} | {
        JSON_NAMES.get(name, name): told[name] for name in _UNLESS_DEFAULT if told[name] != default[name]
    }


def shard_json(shard: Shard) -> dict[str, Any]:
    """The shard as a JSON object."""
    hash_range = {} if shard.hash_range is None else {"hash_range": [str(end) for end in shard.hash_range]}
    return {"id": shard.id, "stream": shard.stream, "parents": list(shard.parents), "open": shard.open, **hash_range}


Form = Callable[[JsonValue], Any]
"""The written form of one field."""

_FIRST = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")

RULES: dict[str, type[RuleSet]] = {each.name: each for each in known_rule_sets()}

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
    if worker is not None and "me" in fields.unread:
        raise BadJsonField("me: the document says who asks, and so does --worker")
    for name in OF_LEASES if worker is not None else ():
        fields.unread.pop(name, None)
    asked = PlanQuestion(
        leases=_each(lease_of)(fields.need("leases")),
        shards=fields.read("shards", _or(None, _each(shard_of)), None),
        me=_object(Me)(fields.need("me")) if worker is None else Me(JsonValue("--worker", worker).name()),
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
            raise BadJsonField(f"{path}[{place}].{field}: {name!r} was given before")
        seen.add(name)


def lease_of(value: JsonValue) -> Lease:
    """Read a lease. Raises BadJsonField, naming the field."""
    fields = value.fields()
    at = fields.need("checkpoint") if "checkpoint" in fields.unread else JsonValue("checkpoint", "TRIM_HORIZON")
    sub, token, sequence = fields.read("sub", _count, 0), fields.read("token", JsonValue.text, ""), at.text()
    try:
        return _built(Lease, fields, checkpoint=Position(sequence, sub, token))
    except BadJsonField:
        raise
    except ValueError:
        raise at.bad(f"one of {', '.join(sorted(SENTINELS))} or a decimal string") from None


def shard_of(value: JsonValue) -> Shard:
    """Read a shard. Raises BadJsonField, naming the field."""
    return _built(Shard, value.fields())


def config_of(value: JsonValue) -> Config:
    """A configuration; the options of the rule set lie flat among the others. Raises BadJsonField, naming the field."""
    fields = value.fields()
    rules = _built(RULES[fields.read("rules", lambda name: name.one_of(*RULES), "minimal")], fields, last=False)
    start = Position(fields.read("initial_position", lambda name: name.one_of(*_FIRST), "LATEST"))
    if start.sequence == "AT_TIMESTAMP":
        start = at_timestamp(fields.need("timestamp_ms").whole(most=2**53))
    return _built(Config, fields, rules=rules, initial_position=start)


def _object(kind: type[T]) -> Callable[[JsonValue], T]:
    return lambda value: _built(kind, value.fields())


def _built(kind: Callable[..., T], fields: UnreadFields, *, last: bool = True, **made: Any) -> T:  # noqa: ANN401  of any kind
    """Build a value of this class from the written fields; `made` was made of several of them.

    last  whether nothing else may be written there
    """
    forms = FORMS[kind]
    fields.asked.update(forms)
    for name, attribute in fields_dict(kind).items():  # type: ignore[arg-type]  # mypy takes a class for a function
        spelled = JSON_NAMES.get(name, name)
        if spelled in forms and (spelled in fields.unread or attribute.default is NOTHING):
            made[name] = forms[spelled](fields.need(spelled))
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
    """A sequence or sub-sequence as large as rows may hold; `sub` under AT_TIMESTAMP is in milliseconds since 1970."""
    return value.whole(most=10**COUNT_DIGITS - 1)


def _hash_key(value: JsonValue) -> int:
    return value.decimal(HASH_KEYS[1])


def _hash_range(value: JsonValue) -> HashRange:
    ends = [_hash_key(each) for each in value.items()]
    if len(ends) != len(HASH_KEYS) or ends[0] > ends[1]:
        raise value.bad("a first and a last hash key, in this order")
    return (ends[0], ends[1])


def _of_type(kind: Any) -> Form:  # noqa: ANN401  what a rule set declares
    """An option is written as its declared type says; its rule set checks the rest."""
    if get_origin(kind) is Literal:
        return lambda value: value.one_of(*get_args(kind))
    if kind in {bool, float}:
        return JsonValue.flag if kind is bool else _seconds
    plain: Form = _whole_or_none if kind is int or int in get_args(kind) else lambda value: value.found
    if tuple[str, ...] not in get_args(kind):
        return plain
    return lambda value: _names(value) if isinstance(value.found, list) else plain(value)


_names, _seconds = _each(JsonValue.name), JsonValue.number
_notes: Callable[[JsonValue], Notes] = _by_name(JsonValue.text)
_name_or_none, _whole_or_none = _or(None, JsonValue.name), _or(None, JsonValue.whole)
_seconds_or_infinite = _or(math.inf, _seconds)

_FORMS_OF_KINDS: Mapping[CellKind, Form] = {
    "name": JsonValue.name,
    "text": JsonValue.text,
    "names": _names,
    "worker": _name_or_none,
    "count": _count,
    "KB/s": _or(None, lambda value: round(value.number() * KB)),
    "seconds": _seconds_or_infinite,
    "flag": JsonValue.flag,
    "notes": _notes,
}
_OF_A_LEASE = fields_dict(Lease).keys() - {"checkpoint"}
_HASH_RANGE: Mapping[str, Form] = {"hash_range": _or(None, _hash_range)}

FORMS: Mapping[Any, Mapping[str, Form]] = {
    Lease: {
        **{
            JSON_NAMES.get(each.name, each.name): _FORMS_OF_KINDS[each.kind]
            for each in FIELDS
            if each.name in _OF_A_LEASE
        },
        **_HASH_RANGE,
        "shard": JsonValue.name,
        "heir_idle": _seconds,  # nobody is named without end
    },
    Shard: {"id": JsonValue.name, "stream": JsonValue.text, "parents": _names, "open": JsonValue.flag, **_HASH_RANGE},
    Hole: {"first": _hash_key, "last": _hash_key, "times": lambda value: value.whole(1)},
    Bulletin: dict.fromkeys(("looks", "acts", "warns"), JsonValue.whole),
    BulletinState: {
        "latest": _object(Bulletin),
        "acts_read": JsonValue.whole,
        "acts_still": _seconds_or_infinite,
        "looks_still": _seconds,
        "warned": _seconds_or_infinite,
        "turned": JsonValue.flag,
        "call": JsonValue.text,
    },
    History: {
        **dict.fromkeys(("owners_still", "fleet_still", "full_still", "full_took"), _seconds),
        **dict.fromkeys(("gaps", "paces"), _by_name(_seconds)),
        "led": _by_name(_seconds_or_infinite),
        "holes": _each(_hole),
        "gone": _each(lease_of),
        "full_apart": _seconds_or_infinite,
        "hearing": _or(None, _object(BulletinState)),
    },
    Me: {"worker": JsonValue.name, "turn": JsonValue.whole, "history": _object(History)},
    Config: dict.fromkeys(("lease_seconds", "cycle_seconds", "renew_seconds"), _seconds),
    **{each: {option.name: _of_type(option.type) for option in fields(each)} for each in RULES.values()},
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
    # Without the problems, for which no leases of a stream are created (L2), the reason would be unknown.
    problems = [asdict(problem) for family in families(asked.shards or ()) for problem in faults(family)]
    return {
        "actions": [action_json(action) for action in actions],
        "look_again_seconds": look.seconds,
        **({} if look.keys is None else {"look_again_keys": list(look.keys)}),
        **_if("look_again_notes", dict(look.notes)),
        **_if("look_again_stale_ok", look.stale_ok),
        **_if("problems", problems),
    }


def action_json(action: Action) -> dict[str, Any]:
    """The action as JSON; `from` is the owner that loses the lease, `to` the one that is to get it."""
    told: dict[str, Any] = {"do": _VERBS[type(action)], "key": action.lease.key, "rule": action.rule}
    match action:
        case Create(lease):
            start = lease.checkpoint
            told |= {"checkpoint": start.sequence, "parents": list(lease.parents)}
            told |= {"timestamp_ms": start.sub} if start.sequence == "AT_TIMESTAMP" else {}
            told |= _if("stream", lease.stream)
        case Steal() | RequestHandoff():
            told["from"] = action.from_owner
            told |= _if("stale_heir", action.stale_next_owner if isinstance(action, RequestHandoff) else None)
        case Release(next_owner=next_owner):
            told |= _if("to", next_owner)
        case Renew(notes=notes):
            told |= _if("notes", dict(notes))
        case Claim() | Delete():
            pass
        case _:
            assert_never(action)
    others = action.alternates if isinstance(action, Claim | Steal | RequestHandoff) else ()
    return told | _if("alternates", [action_json(other) for other in others])


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
