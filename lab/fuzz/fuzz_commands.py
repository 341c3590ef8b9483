"""Fuzz targets for input from users and from Spark: JSON, options, times, lines, and offsets of micro-batches."""

import io
import json
import os
from contextlib import redirect_stdout
from functools import partial
from typing import Any
from unittest.mock import patch

from fuzzing import FuzzTarget, encode_as_json, forbid_repeating

from leasehold.adapters import producing
from leasehold.adapters.cli import deaggregate, produce
from leasehold.adapters.cli.common.columns import format_position
from leasehold.adapters.cli.reset import parse_resets
from leasehold.adapters.consumer.dead_letters import sinks
from leasehold.adapters.consumer.dead_letters.dead_letter import BadDeadLetter, dead_letter_from, sort_key_of
from leasehold.adapters.inputs import (
    combine_settings,
    config_from_settings,
    format_time,
    parse_duration,
    parse_initial_position,
    parse_shift_seconds,
    parse_time_ms,
)
from leasehold.adapters.json_form import BadJsonField, plan_from_json
from leasehold.adapters.multilang.protocol import CheckpointRequested, Conversation, StatusReceived
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.event_hubs.options import CONNECTION_STRING, parse_event_hubs_options
from leasehold.adapters.spark.kinesis.options import parse_kinesis_options
from leasehold.adapters.spark.offsets import decode_offset, encode_offset
from leasehold.balancer.config import Config
from leasehold.balancer.model import Position
from leasehold.stores.urls import split_url
from leasehold_lab.commands import simulate
from leasehold_lab.judge.events import parse_event

NOW = 1.8e9
SECRET = "hush0hush1"  # noqa: S105  not a real secret


def _planned(body: bytes) -> None:
    json.dumps(plan_from_json(body))


def _listed(body: bytes) -> None:
    json.dumps(plan_from_json(body, "me"))


def _reset(body: bytes) -> None:
    for planned_reset in parse_resets(body):
        format_position(planned_reset.was)
        format_position(planned_reset.wanted)


def _parse_duration(text: str) -> None:
    assert parse_duration(text) >= 0


def _moment(text: str) -> None:
    format_position(parse_initial_position(text, NOW, "--to"))
    assert text.strip()[:1].isalpha() or format_time(parse_time_ms(text, NOW)).endswith("Z")


def _options(text: str) -> None:
    assert isinstance(config_from_settings(combine_settings({}, [text])), Config)


def _record(line: str) -> None:
    output = io.StringIO()
    with redirect_stdout(output):
        deaggregate._print_user_records(1, line, None, "keep", strict=False)
    for row in output.getvalue().encode().splitlines():
        assert isinstance(json.loads(row), dict)


def _open_producer(url: str) -> None:
    try:
        producing.open_producer(url, {"linger_ms": -1})  # rejected before any request is sent
    except ValueError as exc:
        if not str(exc).startswith("linger_ms: "):
            raise


def _lines(body: bytes) -> None:
    for key_option in ("line", "field:2", "json:customer", "fixed:a"):
        produce._make_key_function(key_option, ",")(body).encode()


def _offset(stored_offset: Any) -> None:  # noqa: ANN401  any value that Spark stored
    offset = decode_offset(stored_offset)
    assert decode_offset(json.loads(json.dumps(encode_offset(offset)))) == offset


def _texts(document: object) -> dict[str, str]:
    return (
        {name: value for name, value in document.items() if isinstance(value, str)}
        if isinstance(document, dict)
        else {}
    )


def _parse_event_hub_options(parameters: object) -> None:
    connection_string = f"Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey={SECRET}="
    with patch.dict(os.environ, {CONNECTION_STRING: connection_string}), forbid_repeating(SECRET):
        assert SECRET not in repr(parse_event_hubs_options(_texts(parameters)))


def _parse_dead_letter(line: bytes) -> None:
    dead_letter = dead_letter_from(line)
    assert dead_letter_from(dead_letter.line) == dead_letter
    assert sort_key_of(dead_letter.name) is not None


def _receive_child_line(line: bytes) -> None:
    """Assert that no line of a child raises an exception, and that only stored checkpoints are acknowledged."""
    conversation = Conversation("s-0", Position("5"))
    conversation.send_initialize()
    conversation.receive_data(b'{"action":"status","responseFor":"initialize"}\n')
    assert conversation.next_event() == StatusReceived("initialize")
    conversation.send_records([Record(b"data", "9", partition_key="k")], 0.0)
    conversation.receive_data(line + b"\n")
    while (event := conversation.next_event()) is not None:
        if isinstance(event, CheckpointRequested):
            assert Position("5").order < event.position.order <= Position("9").order
            conversation.checkpoint_stored()
    assert conversation.acknowledged.order <= Position("9").order
    conversation.data_to_send()


def _parse_dead_letter_url(url: str) -> None:
    split_url(url, "letters", sinks._SCHEMES)


COMMANDS = (
    FuzzTarget(
        "dead-letters",
        ("adapters/consumer/dead_letters/dead_letter.py",),
        _parse_dead_letter,
        (BadDeadLetter,),
        pack=encode_as_json,
    ),
    FuzzTarget("child-lines", ("adapters/multilang/protocol.py",), _receive_child_line, pack=encode_as_json),
    FuzzTarget(
        "letter-urls",
        ("adapters/consumer/dead_letters/sinks.py",),
        _parse_dead_letter_url,
        (ValueError,),
        "letters URL: ",
    ),
    FuzzTarget(
        "plan-documents",
        ("adapters/json_form.py", "adapters/json_form.py"),
        _planned,
        (BadJsonField,),
        pack=encode_as_json,
    ),
    FuzzTarget("listings-to-plan", ("adapters/json_form.py",), _listed, (BadJsonField,), pack=encode_as_json),
    FuzzTarget("reset-plans", ("adapters/cli/reset.py",), _reset, (ValueError,), "--plan: ", pack=encode_as_json),
    FuzzTarget("durations", ("adapters/inputs.py",), _parse_duration, (ValueError,), "'|\""),
    FuzzTarget("moments", ("adapters/inputs.py",), _moment, (ValueError,), "--to: |--timestamp-ms: "),
    FuzzTarget("shifts", ("adapters/inputs.py",), parse_shift_seconds, (ValueError,), "--shift-by: |'|\""),
    FuzzTarget("settings", ("adapters/inputs.py",), _options, (ValueError, BadJsonField), "--set: |"),
    FuzzTarget("kinesis-lines", ("adapters/cli/deaggregate.py",), _record, (ValueError,), "line 1: "),
    FuzzTarget(
        "produced-lines", ("adapters/cli/produce.py",), _lines, (ValueError, UnicodeDecodeError), "--key |'utf-8' codec"
    ),
    FuzzTarget(
        "keys-of-lines",
        ("adapters/cli/produce.py",),
        partial(produce._make_key_function, delimiter=","),
        (ValueError,),
        "--key: ",
    ),
    FuzzTarget("produce-urls", ("adapters/producing.py",), _open_producer, (ValueError,), "SOURCE URL: "),
    FuzzTarget(
        "fleet-sizes", ("leasehold_lab/commands/simulate.py",), simulate._parse_sizes, (ValueError,), "workers: "
    ),
    FuzzTarget("event-lines", ("leasehold_lab/judge/events.py",), parse_event, (ValueError,), "it is no event: "),
    FuzzTarget(
        "spark-offsets", ("adapters/spark/offsets.py", "adapters/spark/offsets.py"), _offset, (ValueError,), "offset: "
    ),
    FuzzTarget(
        "kinesis-options",
        ("adapters/spark/options.py", "adapters/spark/kinesis/options.py"),
        lambda told: parse_kinesis_options(_texts(told)),
        (ValueError,),
        "option ",
    ),
    FuzzTarget(
        "hub-options",
        ("adapters/spark/options.py", "adapters/spark/event_hubs/options.py"),
        _parse_event_hub_options,
        (ValueError,),
        "option |EVENTHUBS_CONNECTION_STRING: ",
    ),
)
