"""Declares the options of a worker and of a producer: for each, its name, type, default, check, help text and flag.

The two tables are `Options` and `ProduceOptions`. The annotation of each field contains the type in Python, and an
`Option` with everything else. A table defines the keyword arguments of the functions of `leasehold` and the flags of
the commands (`cli.common.table_options`). `check_options` checks values against it, and the reference page lists its
options.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from attrs import evolve, fields_dict, frozen

from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.consumer.handling import DeadLetter, Handling
from leasehold.adapters.consumer.runner import DRAIN_SECONDS, MEMORY_BYTES, READERS
from leasehold.adapters.inputs import SETTING_LIMITS, DurationLimits, check_duration, parse_seconds_option
from leasehold.adapters.json_form import RULES
from leasehold.balancer.model import Position
from leasehold.stores.printable import did_you_mean, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.options"))

MIB = 2**20
DAY_MS = 86_400_000

Seconds = float | str
"""A number of seconds or a duration such as `5m`."""


@frozen
class Option:
    """The properties of an option besides its type.

    Attributes:
        help: What the option does, as a sentence that begins with a verb.
        default: The value if the option is omitted; None if it then has no value.
        unset: A description of what happens if the option is omitted, unless `default` shows it.
        limits: The limits of the value, if the option is a duration. Every duration needs limits.
        least: The smallest allowed whole number.
        most: The largest allowed whole number.
        check: Returns why a value is wrong, or "". Called only for types that `Option` does not check by itself.
        flags: The flags on the command line. By default, the only flag is the name with `-` instead of `_`.
        in_command: Whether the command has a flag for the option. If not, only Python code can set the option.
        name: The name of the option in the table.
        types: The types in Python, according to the table, except None.
    """

    help: str
    default: Any = None
    unset: str = ""
    limits: DurationLimits | None = None
    least: int = 1
    most: int | None = None
    check: Callable[[Any], str] = lambda _value: ""
    flags: tuple[str, ...] = ()
    in_command: bool = True
    name: str = ""
    types: tuple[Any, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, or () if they are not a fixed list."""
        return get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()

    def parse_and_check(self, value: object, option_label: str) -> Any:  # noqa: ANN401  each option has its own type
        """Check the value and return it. A duration is returned in seconds.

        Raises ValueError with a message that begins with `option_label`.
        """
        if self.limits is not None:
            seconds = parse_seconds_option(value, option_label)
            if warning := check_duration(self.limits, seconds, option_label):
                log.warning("%s", warning)
            return seconds
        if reason := self._explain_invalid(value):
            raise ValueError(f"{option_label}: {reason}")
        return value

    def _explain_invalid(self, value: Any) -> str:  # noqa: ANN401  anything
        if self.choices:
            return "" if value in self.choices else f"{value!r} is neither {' nor '.join(self.choices)}"
        match self.types:
            case (expected_type,) if expected_type is bool and not isinstance(value, bool):
                return f"{value!r} is neither True nor False"
            case (expected_type,) if expected_type is str and not isinstance(value, str):
                return f"{value!r} is not a string"
            case (expected_type,) if expected_type is int:
                is_integer = isinstance(value, int) and not isinstance(value, bool)
                if not is_integer or value < self.least:
                    return f"{value!r} is not a whole number {'above 0' if self.least == 1 else f'from {self.least}'}"
                if self.most is not None and value > self.most:
                    return f"{value} is more than {self.most}"
        return self.check(value)


def options_by_name(table: type) -> Mapping[str, Option]:
    """Return the options of a table by name, in the order of the table."""
    options = dict[str, Option]()
    for name, annotation in get_type_hints(table, include_extras=True).items():
        type_hint, option = get_args(annotation)
        declared_types = tuple(
            declared_type for declared_type in get_args(type_hint) if declared_type is not type(None)
        )
        options[name] = evolve(option, name=name, types=declared_types)
    return options


def check_options(
    table: type, given_options: Mapping[str, Any], option_label: Callable[[str], str] = str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check the options by their table.

    Args:
        table: `Options` or `ProduceOptions`.
        given_options: The options by name; None stands for the default.
        option_label: Returns an option's name as the user writes it, such as `--to`, for error messages.

    Returns:
        Two dictionaries, both with durations in seconds: the options that are given, and all options, with defaults for
        those that are not given.

    Raises:
        ValueError: An option is wrong. The message names the option.
        TypeError: There is no such option.
    """
    options, checked_values = options_by_name(table), dict[str, Any]()
    for name, value in given_options.items():
        if name not in options:
            raise TypeError(f"{name}: there is no such option{did_you_mean(name, options)}")
        if value is not None:
            checked_values[name] = options[name].parse_and_check(value, option_label(name))
    return checked_values, {name: option.default for name, option in options.items()} | checked_values


def _check_meter(value: object) -> str:
    is_usable = isinstance(value, str) or callable(getattr(value, "create_counter", None))
    return "" if is_usable else f"{value!r} is neither the name of an exporter nor a meter"


def _check_share(value: object) -> str:
    is_usable = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return "" if is_usable else f"{value!r} is not a number above 0"


_HANDLING_DEFAULTS = {name: attribute.default for name, attribute in fields_dict(Handling).items()}
"""The defaults of the options that are fields of `Handling`."""


class Options(TypedDict, total=False):
    """The options of a worker; None stands for the default. `leasehold consume` has them as flags."""

    worker: Annotated[str | None, Option("Use this id for the worker; keep it over restarts.", unset="host-pid")]
    rules: Annotated[str | None, Option(f"Take leases by these rules: {', '.join(RULES)}.", "minimal")]
    lease_seconds: Annotated[
        Seconds | None,
        Option(
            "Treat a worker as dead after this long without a renewal; same for all workers.",
            unset="10; hubs: 120",
            limits=SETTING_LIMITS["lease_seconds"],
        ),
    ]
    initial_position: Annotated[
        str | datetime | Position | None,
        Option(
            "Start new leases at TRIM_HORIZON, LATEST, or a time: 2026-11-22T06:00Z, now-2h.",
            "LATEST",
            flags=("--initial-position", "--from"),
        ),
    ]
    until: Annotated[
        str | datetime | None, Option("Read a slice up to this time, and end. The store holds its leases alone.")
    ]
    if_recreated: Annotated[
        Literal["TRIM_HORIZON", "LATEST"] | None,
        Option("Start at TRIM_HORIZON or LATEST if the stream was deleted and created again.", unset="it is not read"),
    ]
    set: Annotated[
        Sequence[str] | Mapping[str, object] | None, Option("Change another setting of the planner, as name=value.")
    ]
    concurrency: Annotated[
        int | None, Option("Handle this many keys of a batch at once, each in order; for async def or lambda:.")
    ]
    attempts: Annotated[int | None, Option("Try a batch this many times.", _HANDLING_DEFAULTS["attempts"])]
    max_records: Annotated[
        int | None, Option("Put at most this many records into a batch.", unset="as many as one read brings")
    ]
    linger_seconds: Annotated[
        Seconds | None,
        Option(
            "Let the first record of a batch wait this long for more, up to max_records or 6 MiB.",
            _HANDLING_DEFAULTS["linger_seconds"],
            limits=DurationLimits(0.0, 300.0, "each record may wait that long before it is handled"),
        ),
    ]
    threads: Annotated[int | None, Option("Read or handle this many shards at a time, each in a thread.", READERS)]
    dead_letter: Annotated[
        str | DeadLetter | None,
        Option("Send records that keep failing here: file://…, s3://…, kinesis://…, or module:function(batch, error)."),
    ]
    max_age_seconds: Annotated[
        Seconds | None,
        Option(
            "Send records that arrived longer ago to the dead letter, not to the handler.",
            unset="no limit",
            limits=DurationLimits(1.0, 366 * 86400.0, "no stream keeps records for that long"),
        ),
    ]
    slow_seconds: Annotated[
        Seconds | None,
        Option(
            "Log and count handlers that run longer than this.",
            _HANDLING_DEFAULTS["slow_seconds"],
            limits=DurationLimits(0.0, 86400.0, "a handler that hangs is not logged before that"),
            in_command=False,
        ),
    ]
    handler_seconds: Annotated[
        Seconds | None,
        Option(
            "Give up a batch that takes longer than this.",
            unset="never",
            limits=DurationLimits(0.01, 3600.0, "a handler that hangs keeps its shard from being read for that long"),
        ),
    ]
    checkpoint_seconds: Annotated[
        Seconds | None,
        Option(
            "Wait at least this long between two checkpoints; 0: checkpoint after every batch.",
            _HANDLING_DEFAULTS["checkpoint_seconds"],
            limits=DurationLimits(0.0, 3600.0, "a worker that dies repeats what it handled in that time"),
        ),
    ]
    late_checkpoints: Annotated[
        bool | None,
        Option(
            "Try to save a batch's checkpoint even if the shard moved meanwhile.",
            _HANDLING_DEFAULTS["late_checkpoints"],
        ),
    ]
    drain_seconds: Annotated[
        Seconds | None,
        Option(
            "Finish and release within this time when told to end.",
            DRAIN_SECONDS,
            limits=DurationLimits(0.0, 3600.0, "a worker that is told to end may take that long"),
        ),
    ]
    create: Annotated[bool | None, Option("Make the lease table if there is none.", default=True)]
    wait: Annotated[bool | None, Option("Keep trying if stream or store do not answer at the start.", default=True)]
    memory_mib: Annotated[
        int | None, Option("Hold at most this many MiB that are read and not handled yet.", MEMORY_BYTES // MIB)
    ]
    metrics: Annotated[
        str | Meter | None,
        Option(
            "Record metrics with this OpenTelemetry meter, or by an exporter: none, console, otlp.",
            unset="OTEL_METRICS_EXPORTER, or none",
            check=_check_meter,
            in_command=False,
        ),
    ]
    to: Annotated[
        str | None, Option("Name the store to which `leasehold swap` moves the leases while the fleet reads.")
    ]


class ProduceOptions(TypedDict, total=False):
    """The options of `leasehold.produce`; None stands for the default. `leasehold produce` has them as flags."""

    linger_ms: Annotated[
        int | None, Option("Let a record wait this long for others of its shard.", 100, least=0, most=DAY_MS)
    ]
    share: Annotated[
        float | None,
        Option("Use at most this share of each shard's write rate; 1 is all of it.", 1.0, check=_check_share),
    ]
    time_to_live: Annotated[
        Seconds | None,
        Option(
            "Treat a record as late after this time.",
            30.0,
            limits=DurationLimits(0.001, 86400.0, "a record that cannot be written counts as late only after that"),
        ),
    ]
    on_late: Annotated[
        Literal["block", "fail"] | None,
        Option("Choose what happens to a late record. block: it keeps its place; fail: it is given up.", "block"),
    ]
    epoch: Annotated[int | None, Option("Mark each record with this number and a counter.", least=0, most=2**64 - 1)]
