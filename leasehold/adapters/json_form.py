"""Parses JSON documents that describe a group, and formats the plan for it as JSON, without I/O.

`JsonValue` parses a document field by field, and every error message names the field by its path. `format_lease_json`
and `format_shard_json` format leases and shards in the form that `leasehold plan` reads. Fields of a lease that have
their default values are omitted. `parse_plan_request` parses leases, shards, worker and configuration. `FORMS` defines
how the fields of each class are written. The classes themselves define which fields are required, and the defaults.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Never, TypeVar, assert_never, get_args, get_origin

from attrs import NOTHING, asdict, define, field, fields, fields_dict, frozen

from leasehold.balancer.actions import Action, Claim, Create, Delete, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.family import blocking_problems, families
from leasehold.balancer.model import (
    HASH_KEYS,
    SENTINELS,
    Annotations,
    Bulletin,
    BulletinState,
    HashRange,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Shard,
    at_timestamp,
)
from leasehold.balancer.plan import look_again, plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.plugins import known_rule_sets
from leasehold.stores.fields import COUNT_DIGITS, FIELDS, KB, CellKind, lease_to_cells
from leasehold.stores.printable import did_you_mean, printable

T = TypeVar("T")

NUMBER_MAX = 1e12
"""The largest number that a document may contain. The seconds, counts and weights of real groups are far smaller."""


class BadJsonField(ValueError):
    """A field is missing, unknown or wrong. The message begins with the field's path."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def parse_json_document(text: bytes) -> "JsonValue":
    """Parse a JSON document. Raises BadJsonField if it is not valid, or if an object contains a field twice."""

    def check_fields_are_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields_by_name = dict(pairs)
        if len(fields_by_name) < len(pairs):
            duplicate_name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise BadJsonField(f"{duplicate_name}: given twice in one object")
        return fields_by_name

    def reject_constant(text: str) -> Never:
        raise BadJsonField(f"input: {text} is not a JSON number; write null for what is unknown or infinite")

    try:
        document = json.loads(text, object_pairs_hook=check_fields_are_unique, parse_constant=reject_constant)
    except BadJsonField:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJsonField(f"input: not a JSON document ({str(error) or 'nested too deeply'})") from None
    return JsonValue("input", document)


@frozen
class JsonValue:
    """A value and its path in the document.

    Each method returns the value as one type, or raises BadJsonField if the value has a different type.
    """

    path: str
    raw_value: Any

    def make_error(self, expected: str) -> BadJsonField:
        """Return an error with the message that this value is not `expected`."""
        try:
            found_json = json.dumps(self.raw_value, default=str)
        except RecursionError:  # the value is nested so deeply that it can be parsed but not formatted
            found_json = "a value of a thousand levels"
        if len(found_json) > 60:  # noqa: PLR2004  one line
            found_json = found_json[:57] + "..."
        return BadJsonField(f"{self.path}: {found_json} is not {expected}")

    def parse_text(self) -> str:
        """Return the value, which must be a string."""
        if not isinstance(self.raw_value, str):
            raise self.make_error("a string")
        return self.raw_value

    def parse_name(self) -> str:
        """Return the value, which must be a string of at least one character."""
        if not self.parse_text():
            raise self.make_error("a name")
        return self.parse_text()

    def parse_one_of(self, *names: str) -> str:
        """Return the value, which must be one of these strings."""
        if not isinstance(self.raw_value, str) or self.raw_value not in names:
            hint = did_you_mean(self.raw_value, names) if isinstance(self.raw_value, str) else ""
            raise self.make_error(f"one of {', '.join(names)}{hint}")
        return self.raw_value

    def parse_flag(self) -> bool:
        """Return the value, which must be true or false."""
        if not isinstance(self.raw_value, bool):
            raise self.make_error("true or false")
        return self.raw_value

    def parse_number(self, minimum: float = 0.0, maximum: float = NUMBER_MAX) -> float:
        """Return the value, which must be a number from `minimum` to `maximum`."""
        if isinstance(self.raw_value, bool) or not isinstance(self.raw_value, int | float):
            raise self.make_error("a number")
        if not minimum <= self.raw_value <= maximum:
            raise self.make_error(f"between {minimum:g} and {maximum:g}")
        return float(self.raw_value)

    def parse_integer(self, minimum: int = 0, maximum: float = NUMBER_MAX) -> int:
        """Return the value, which must be an integer from `minimum` to `maximum`."""
        if isinstance(self.raw_value, bool) or not isinstance(self.raw_value, int):
            raise self.make_error("a whole number")
        if not minimum <= self.raw_value <= maximum:
            raise self.make_error(f"between {minimum} and {maximum:g}")
        return self.raw_value

    def parse_decimal(self, maximum: int) -> int:
        """Return the integer in the value, which must be a decimal string.

        Unlike a JSON number, a string keeps all digits of a large integer.
        """
        text = self.parse_text()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(maximum)) and int(text) <= maximum):
            raise self.make_error(f"a decimal string of at most {maximum}")
        return int(text)

    def items(self) -> list["JsonValue"]:
        """Return the elements of the value, which must be a list."""
        if not isinstance(self.raw_value, list):
            raise self.make_error("a list")
        return [JsonValue(f"{self.path}[{index}]", element) for index, element in enumerate(self.raw_value)]

    def fields(self) -> "UnreadFields":
        """Return the fields of the value, which must be an object."""
        if not isinstance(self.raw_value, dict):
            raise self.make_error("an object")
        return UnreadFields("" if self.path == "input" else f"{self.path}.", dict(self.raw_value))

    def parse_unless_null(self, parse: Callable[["JsonValue"], T], *, null: T) -> T:
        """Return the value that `parse` returns, or `null` if the value is null."""
        return null if self.raw_value is None else parse(self)


@define
class UnreadFields:
    """The fields of one object that have not been read yet.

    Attributes:
        prefix: The path of the object, with a dot at its end.
        unread: The values of the fields.
        allowed_names: The names of the allowed fields, for suggestions in messages.
    """

    prefix: str
    unread: dict[str, Any] = field(factory=dict)
    allowed_names: set[str] = field(factory=set)

    def take_required_field(self, name: str) -> JsonValue:
        """Remove a required field from the unread fields, and return it. Raises BadJsonField if it is missing."""
        if name not in self.unread:
            raise BadJsonField(f"{self.prefix}{name}: is missing")
        return JsonValue(f"{self.prefix}{name}", self.unread.pop(name))

    def take_optional_field(self, name: str, parse: Callable[[JsonValue], T], default: T) -> T:
        """Remove an optional field from the unread fields, and return its parsed value or the default."""
        self.allowed_names.add(name)
        return parse(self.take_required_field(name)) if name in self.unread else default

    def check_all_read(self) -> None:
        """Raise BadJsonField if any field has not been read."""
        for name in self.unread:
            raise BadJsonField(f"{self.prefix}{name}: unknown field{did_you_mean(name, self.allowed_names)}")


_REQUIRED_LEASE_FIELDS = ("key", "owner", "version", "idle", "checkpoint")
_OPTIONAL_LEASE_FIELDS = (
    *("sub", "token", "stream", "shard", "parents", "hash_range", "next_owner", "next_owner_idle", "yields"),
    *("leaving", "epoch", "annotations", "weight", "held"),
)
_DEFAULT_LEASE_CELLS = lease_to_cells(Lease(""))

JSON_NAMES = {"next_owner": "heir", "next_owner_idle": "heir_idle", "annotations": "notes"}
"""The fields of a lease that have a different name in JSON."""


def format_lease_json(lease: Lease) -> dict[str, Any]:
    """Return the lease as a JSON object, which always contains key, owner, version, idle and checkpoint."""
    values = lease_to_cells(lease)
    default_values = _DEFAULT_LEASE_CELLS | {"shard": lease.key}
    return {name: values[name] for name in _REQUIRED_LEASE_FIELDS} | {
        JSON_NAMES.get(name, name): values[name]
        for name in _OPTIONAL_LEASE_FIELDS
        if values[name] != default_values[name]
    }


def format_shard_json(shard: Shard) -> dict[str, Any]:
    """Return the shard as a JSON object."""
    hash_range = {} if shard.hash_range is None else {"hash_range": [str(end) for end in shard.hash_range]}
    return {"id": shard.id, "stream": shard.stream, "parents": list(shard.parents), "open": shard.open, **hash_range}


Form = Callable[[JsonValue], Any]
"""Parses the written form of one field."""

_INITIAL_POSITIONS = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")

RULES: dict[str, type[RuleSet]] = {each.name: each for each in known_rule_sets()}

LISTING_FIELDS = ("at", "lags", "malformed", "says", "status", "statuses", "trouble")
"""Fields that `leasehold leases --json` prints in addition to the leases."""


@frozen
class PlanRequest:
    """The input of a plan."""

    leases: tuple[Lease, ...]
    shards: tuple[Shard, ...] | None
    me: Me
    config: Config


def parse_plan_request(text: bytes, worker: str | None = None) -> PlanRequest:
    """Parse the JSON input of a plan. Raises BadJsonField, naming the field.

    Args:
        text: The document.
        worker: The worker for which to plan, if the document does not contain one. The document may then be the output
            of `leasehold leases --json`.
    """
    fields = parse_json_document(text).fields()
    if worker is not None and "me" in fields.unread:
        raise BadJsonField("me: the document names the worker, and so does --worker")
    for name in LISTING_FIELDS if worker is not None else ():
        fields.unread.pop(name, None)
    request = PlanRequest(
        leases=_form_of_tuple(parse_lease)(fields.take_required_field("leases")),
        shards=fields.take_optional_field("shards", _nullable_form(None, _form_of_tuple(parse_shard)), None),
        me=_form_of_class(Me)(fields.take_required_field("me"))
        if worker is None
        else Me(JsonValue("--worker", worker).parse_name()),
        config=fields.take_optional_field("config", parse_config, Config()),
    )
    fields.check_all_read()
    _check_unique("leases", "key", (lease.key for lease in request.leases))
    _check_unique("shards", "id", (shard.id for shard in request.shards or ()))
    return request


def _check_unique(path: str, field: str, names: Iterable[str]) -> None:
    seen_names: set[str] = set()
    for index, name in enumerate(names):
        if name in seen_names:
            raise BadJsonField(f"{path}[{index}].{field}: {name!r} was given before")
        seen_names.add(name)


def parse_lease(value: JsonValue) -> Lease:
    """Parse a lease. Raises BadJsonField, naming the field."""
    fields = value.fields()
    checkpoint = (
        fields.take_required_field("checkpoint")
        if "checkpoint" in fields.unread
        else JsonValue("checkpoint", "TRIM_HORIZON")
    )
    sub, token, sequence = (
        fields.take_optional_field("sub", _parse_count, 0),
        fields.take_optional_field("token", JsonValue.parse_text, ""),
        checkpoint.parse_text(),
    )
    try:
        return _build_from_fields(Lease, fields, checkpoint=Position(sequence, sub, token))
    except BadJsonField:
        raise
    except ValueError:
        raise checkpoint.make_error(f"one of {', '.join(sorted(SENTINELS))} or a decimal string") from None


def parse_shard(value: JsonValue) -> Shard:
    """Parse a shard. Raises BadJsonField, naming the field."""
    return _build_from_fields(Shard, value.fields())


def parse_config(value: JsonValue) -> Config:
    """Parse a configuration. The rule set's options are fields of the configuration itself. Raises BadJsonField."""
    fields = value.fields()
    rules = _build_from_fields(
        RULES[fields.take_optional_field("rules", lambda name: name.parse_one_of(*RULES), "minimal")],
        fields,
        is_complete=False,
    )
    initial_position = Position(
        fields.take_optional_field("initial_position", lambda name: name.parse_one_of(*_INITIAL_POSITIONS), "LATEST")
    )
    if initial_position.sequence == "AT_TIMESTAMP":
        initial_position = at_timestamp(fields.take_required_field("timestamp_ms").parse_integer(maximum=2**53))
    return _build_from_fields(Config, fields, rules=rules, initial_position=initial_position)


def _form_of_class(kind: type[T]) -> Callable[[JsonValue], T]:
    return lambda value: _build_from_fields(kind, value.fields())


def _build_from_fields(
    kind: Callable[..., T],
    fields: UnreadFields,
    *,
    is_complete: bool = True,
    **attributes: Any,  # noqa: ANN401  of any kind
) -> T:
    """Build a value of this class from the written fields.

    Args:
        kind: The class.
        fields: The written fields.
        is_complete: Whether all fields must have been read afterwards.
        attributes: Attributes that the caller has already built, because each depends on several fields.
    """
    forms = FORMS[kind]
    fields.allowed_names.update(forms)
    for name, attribute in fields_dict(kind).items():  # type: ignore[arg-type]  # mypy treats the class as a function
        json_name = JSON_NAMES.get(name, name)
        if json_name in forms and (json_name in fields.unread or attribute.default is NOTHING):
            attributes[name] = forms[json_name](fields.take_required_field(json_name))
    if is_complete:
        fields.check_all_read()
    try:
        return kind(**attributes)
    except (TypeError, ValueError) as error:
        raise BadJsonField(f"{fields.prefix}{str(error.args[0]).splitlines()[0]}") from None


def _nullable_form(null: object, form: Form) -> Form:
    return lambda value: value.parse_unless_null(form, null=null)


def _form_of_tuple(form: Callable[[JsonValue], T]) -> Callable[[JsonValue], tuple[T, ...]]:
    return lambda value: tuple(form(element) for element in value.items())


def _parse_hole(value: JsonValue) -> Hole:
    fields = value.fields()
    return _build_from_fields(Hole, fields, stream=fields.take_optional_field("stream", JsonValue.parse_text, ""))


def _form_of_pairs(form: Callable[[JsonValue], T]) -> Callable[[JsonValue], tuple[tuple[str, T], ...]]:
    """Return a function that parses an object into pairs of name and value, sorted by name."""

    def parse_pairs(value: JsonValue) -> tuple[tuple[str, T], ...]:
        unread_fields = value.fields()
        return tuple((name, form(unread_fields.take_required_field(name))) for name in sorted(unread_fields.unread))

    return parse_pairs


def _parse_count(value: JsonValue) -> int:
    """Parse a count up to the largest number that a row may contain.

    The count `sub` can be large, because with AT_TIMESTAMP it is a time in milliseconds.
    """
    return value.parse_integer(maximum=10**COUNT_DIGITS - 1)


def _parse_hash_key(value: JsonValue) -> int:
    return value.parse_decimal(HASH_KEYS[1])


def _parse_hash_range(value: JsonValue) -> HashRange:
    bounds = [_parse_hash_key(end) for end in value.items()]
    if len(bounds) != len(HASH_KEYS) or bounds[0] > bounds[1]:
        raise value.make_error("a first and a last hash key, in this order")
    return (bounds[0], bounds[1])


def _form_for_type(kind: Any) -> Form:  # noqa: ANN401  the type that a rule set declares
    """Return the form for the declared type of a rule set's option. The rule set itself checks all other types."""
    if get_origin(kind) is Literal:
        return lambda value: value.parse_one_of(*get_args(kind))
    if kind in {bool, float}:
        return JsonValue.parse_flag if kind is bool else _parse_seconds
    scalar_form: Form = (
        _parse_integer_or_none if kind is int or int in get_args(kind) else lambda value: value.raw_value
    )
    if tuple[str, ...] not in get_args(kind):
        return scalar_form
    return lambda value: _parse_names(value) if isinstance(value.raw_value, list) else scalar_form(value)


_parse_names, _parse_seconds = _form_of_tuple(JsonValue.parse_name), JsonValue.parse_number
_parse_annotations: Callable[[JsonValue], Annotations] = _form_of_pairs(JsonValue.parse_text)
_parse_name_or_none, _parse_integer_or_none = (
    _nullable_form(None, JsonValue.parse_name),
    _nullable_form(None, JsonValue.parse_integer),
)
_parse_seconds_or_infinite = _nullable_form(math.inf, _parse_seconds)

_FORMS_BY_CELL_KIND: Mapping[CellKind, Form] = {
    "name": JsonValue.parse_name,
    "text": JsonValue.parse_text,
    "names": _parse_names,
    "worker": _parse_name_or_none,
    "count": _parse_count,
    "KB/s": _nullable_form(None, lambda value: round(value.parse_number() * KB)),
    "seconds": _parse_seconds_or_infinite,
    "flag": JsonValue.parse_flag,
    "notes": _parse_annotations,
}
_LEASE_FIELD_NAMES = fields_dict(Lease).keys() - {"checkpoint"}
_HASH_RANGE: Mapping[str, Form] = {"hash_range": _nullable_form(None, _parse_hash_range)}

FORMS: Mapping[Any, Mapping[str, Form]] = {
    Lease: {
        **{
            JSON_NAMES.get(each.name, each.name): _FORMS_BY_CELL_KIND[each.kind]
            for each in FIELDS
            if each.name in _LEASE_FIELD_NAMES
        },
        **_HASH_RANGE,
        "shard": JsonValue.parse_name,
        "heir_idle": _parse_seconds,  # never infinite
    },
    Shard: {
        "id": JsonValue.parse_name,
        "stream": JsonValue.parse_text,
        "parents": _parse_names,
        "open": JsonValue.parse_flag,
        **_HASH_RANGE,
    },
    Hole: {"first": _parse_hash_key, "last": _parse_hash_key, "times": lambda value: value.parse_integer(1)},
    Bulletin: dict.fromkeys(("looks", "acts", "warns"), JsonValue.parse_integer),
    BulletinState: {
        "latest": _form_of_class(Bulletin),
        "acts_read": JsonValue.parse_integer,
        "acts_still": _parse_seconds_or_infinite,
        "looks_still": _parse_seconds,
        "warned": _parse_seconds_or_infinite,
        "turned": JsonValue.parse_flag,
        "call": JsonValue.parse_text,
    },
    History: {
        **dict.fromkeys(("owners_still", "fleet_still", "full_still", "full_took"), _parse_seconds),
        **dict.fromkeys(("gaps", "paces"), _form_of_pairs(_parse_seconds)),
        "led": _form_of_pairs(_parse_seconds_or_infinite),
        "holes": _form_of_tuple(_parse_hole),
        "gone": _form_of_tuple(parse_lease),
        "full_apart": _parse_seconds_or_infinite,
        "hearing": _nullable_form(None, _form_of_class(BulletinState)),
    },
    Me: {"worker": JsonValue.parse_name, "turn": JsonValue.parse_integer, "history": _form_of_class(History)},
    Config: dict.fromkeys(("lease_seconds", "cycle_seconds", "renew_seconds"), _parse_seconds),
    **{each: {option.name: _form_for_type(option.type) for option in fields(each)} for each in RULES.values()},
}
"""How the fields of each class are written. A lease's checkpoint and a configuration's rules and initial position are
missing, because each is made from several fields. The stream of a hole is missing because it is optional."""


def plan_from_json(text: bytes, worker: str | None = None) -> dict[str, Any]:
    """Return the plan for one JSON document. Raises BadJsonField, naming the field, if the document is not valid.

    Args:
        text: The document.
        worker: The worker for which to plan, if the document is the output of `leasehold leases --json`.
    """
    request = parse_plan_request(text, worker)
    actions = plan(request.leases, request.shards, request.me, request.config)
    look = look_again(actions, request.leases, request.me, request.config)
    # The problems explain why no leases of a stream are created (L2).
    problems = [asdict(problem) for family in families(request.shards or ()) for problem in blocking_problems(family)]
    return {
        "actions": [format_action_json(action) for action in actions],
        "look_again_seconds": look.seconds,
        **({} if look.keys is None else {"look_again_keys": list(look.keys)}),
        **_field_unless_empty("look_again_notes", dict(look.annotations)),
        **_field_unless_empty("look_again_stale_ok", look.stale_ok),
        **_field_unless_empty("problems", problems),
    }


def format_action_json(action: Action) -> dict[str, Any]:
    """Return the action as JSON values.

    In the document, `from` is the owner that loses the lease, and `to` is the next owner.
    """
    document: dict[str, Any] = {"do": _VERBS[type(action)], "key": action.lease.key, "rule": action.rule}
    match action:
        case Create(lease):
            start = lease.checkpoint
            document |= {"checkpoint": start.sequence, "parents": list(lease.parents)}
            document |= {"timestamp_ms": start.sub} if start.sequence == "AT_TIMESTAMP" else {}
            document |= _field_unless_empty("stream", lease.stream)
        case Steal() | RequestHandoff():
            document["from"] = action.from_owner
            document |= _field_unless_empty(
                "stale_heir", action.stale_next_owner if isinstance(action, RequestHandoff) else None
            )
        case Release(next_owner=next_owner):
            document |= _field_unless_empty("to", next_owner)
        case Renew(annotations=annotations):
            document |= _field_unless_empty("notes", dict(annotations))
        case Claim() | Delete():
            pass
        case _:
            assert_never(action)
    alternates = action.alternates if isinstance(action, Claim | Steal | RequestHandoff) else ()
    return document | _field_unless_empty("alternates", [format_action_json(alternate) for alternate in alternates])


_VERBS = {
    Create: "create",
    Renew: "renew",
    Claim: "claim",
    Steal: "steal",
    RequestHandoff: "request-handoff",
    Release: "release",
    Delete: "delete",
}


def _field_unless_empty(name: str, value: object) -> dict[str, Any]:
    return {name: value} if value else {}
