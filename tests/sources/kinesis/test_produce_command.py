"""The commands `leasehold produce` and `leasehold deaggregate`."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from aggregation_rows import packed
from kept_records import RecordingClient, producing, rejection
from produced_flights import stored
from typer.testing import CliRunner
from types_boto3_kinesis import KinesisClient

from leasehold.adapters.cli.main import COMMANDS
from leasehold.adapters.cli.produce import _EndSignalTracker, _make_key_function
from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.producer.producer import RecordFuture

E_ACUTE = b'{"c": "\xc3\xa9"}'
COMMAND = (sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()")


def _leasehold(command: str, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    app = import_module(f"leasehold.adapters.cli.{COMMANDS[command][0]}").app
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_lines_are_keyed_by_column_by_member_or_whole(
    client: KinesisClient, stream: str, kinesis_url: str, tmp_path: Path
) -> None:
    source = f"kinesis://{stream}?region=eu-west-1&endpoint={kinesis_url}"
    file = tmp_path / "lines"
    file.write_bytes(b"a,1\nb,2\n\na,3")
    assert _leasehold("produce", source, str(file), "--key", "field:1")[0] == 0
    assert _leasehold("produce", source, "--key", "json:c", stdin=E_ACUTE + b'\r\n{"c": 7}\n')[0] == 0
    status, output, _ = _leasehold("produce", source, stdin=b"whole\n")
    assert (status, output.split(",")[0]) == (0, "1 records written")
    rows = Counter(
        (user_record.partition_key, user_record.data)
        for record in stored(client, stream)
        for user_record in deaggregate(record.data, record.partition_key, None, record.hash_range)
    )
    lines = [("a", b"a,1"), ("b", b"b,2"), ("a", b"a,3"), ("\u00e9", E_ACUTE), ("7", b'{"c": 7}'), ("whole", b"whole")]
    assert rows == Counter(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kinesis://s?x=1"], "SOURCE URL: unknown option 'x'"),
        (["kinesis://s?wire=xml"], "SOURCE URL: option 'wire' must be cbor, json or boto3"),
        (["http://s"], "SOURCE URL: unknown scheme 'http'"),
        (["kinesis://[hush"], "SOURCE URL: it is not a valid URL"),
        (["kinesis://s/t"], "SOURCE URL: write kinesis://STREAM"),
        (["kinesis://s", "--key", "field:0"], "--key: 'field:0' is none of"),
        (["kinesis://s", "--key", "field:" + "9" * 5000], "--key: 'field:9"),
        (["kinesis://s", "--on-late", "drop"], "--on-late: 'drop' is neither"),
        (["kinesis://s", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    status, out, err = _leasehold("produce", *arguments)
    assert (status, out, err.count("\n"), message in err) == (2, "", 1, True)


def test_line_without_a_key_is_named_after_earlier_lines_are_sent(
    client: KinesisClient, stream: str, kinesis_url: str
) -> None:
    source = f"kinesis://{stream}?region=eu-west-1&endpoint={kinesis_url}"
    status, _, err = _leasehold("produce", source, "--key", "field:2", stdin=b"a,b\nc\nd,e\n")
    message = "line 2: it cannot become a record: --key field:2: it has 1 fields between ','; see --delimiter"
    assert (status, message in err) == (2, True)
    assert [record.data for record in stored(client, stream)] == [b"a,b"]


@pytest.mark.parametrize(
    ("key", "line", "message"),
    [
        ("field:99", b"a,b,c", "--key field:99: it has 3 fields between ','; see --delimiter"),
        ("json:who", b'{"x": 1}', "--key json:who: it is not an object with a member 'who' that is not null"),
        ("json:who", b"[1]", "--key json:who: it is not an object with a member 'who' that is not null"),
        ("json:who", b'{"who": null}', "--key json:who: it is not an object with a member 'who' that is not null"),
        ("json:who", b'{"who": NaN}', "--key json:who: it is not JSON"),
        ("json:who", b'{"who": [1e400]}', "--key json:who: its number is too large"),
        ("json:who", b"who", "--key json:who: it is not JSON"),
        ("json:who", b"[" * 20_000, "--key json:who: it is not JSON"),
        ("json:who", b'{"who": "\\ud800"}', "--key json:who: '\\ud800' is not UTF-8"),
    ],
)
def test_line_without_its_key_names_the_requested_key(key: str, line: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _make_key_function(key, ",")(line)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ('"a"', "a"),
        ('"null"', "null"),
        ('"\u00e9"', "\u00e9"),
        ("true", "true"),
        ("false", "false"),
        ("0", "0"),
        ("1.0", "1.0"),
        ("12345678901234567890123", "12345678901234567890123"),
        ('[1, "\u00e9"]', '[1,"\u00e9"]'),
        ('{"a": null}', '{"a":null}'),
        ("[]", "[]"),
    ],
)
def test_key_that_is_no_string_is_spelled_as_in_json(value: str, key: str) -> None:
    """The key has a fixed spelling, so that it does not depend on the program that wrote the line."""
    assert _make_key_function("json:who", ",")(f'{{"who": {value}}}'.encode()) == key


def test_rejected_record_is_named_and_all_others_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command names the line of the rejected record, continues with the next line, and exits with status 1."""

    def reject_bad_record(data: list[bytes]) -> None:
        if b"bad" in data:
            raise rejection("ValidationException")

    client = RecordingClient(reject_bad_record)
    monkeypatch.setattr("leasehold.adapters.cli.produce.open_producer", lambda *_: producing(client))
    status, out, err = _leasehold("produce", "kinesis://s", "--key", "fixed:k", stdin=b"a\nb\n\nbad\nc\n")
    assert (status, client.data, out.split(",")[0]) == (1, [b"a", b"b", b"c"], "3 records written")
    assert (err.count("\n"), err.startswith("leasehold produce: line 4: the record cannot be sent")) == (1, True)


@pytest.mark.parametrize("counter", ["UserRecordsPending", "UserRecordExpired", "UserRecordsFailed"])
def test_line_that_is_not_in_the_stream_makes_the_status_1(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    counts = Counter({"UserRecordsPut": 7})
    monkeypatch.setattr("leasehold.adapters.cli.produce.open_producer", lambda *_: None)
    monkeypatch.setattr("leasehold.adapters.cli.produce._write_lines", lambda *_: counts)
    assert _leasehold("produce", "kinesis://s")[0] == 0
    counts[counter] = 1
    assert _leasehold("produce", "kinesis://s")[0] == 1


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_of_either_kind_ends_the_command_at_once(first: signal.Signals) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers_before = [signal.getsignal(number) for number in numbers]
    with _EndSignalTracker() as tracker:
        signal.raise_signal(first)
        assert tracker.end_requested
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(number) for number in numbers] == handlers_before


def test_signal_while_a_line_is_put_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is sent, and the command ends without reading the next one."""
    client = RecordingClient()
    producer = producing(client)
    put = producer.put

    def put_during_signal(data: bytes, key: str) -> RecordFuture:
        signal.raise_signal(signal.SIGINT)
        return put(data, key)

    monkeypatch.setattr(producer, "put", put_during_signal)
    monkeypatch.setattr("leasehold.adapters.cli.produce.open_producer", lambda *_: producer)
    status, out, _ = _leasehold("produce", "kinesis://s", "--key", "fixed:k", stdin=b"a\nb\n")
    assert (status, client.data, out.split(",")[0]) == (0, [b"a"], "1 records written")


@pytest.mark.services
def test_signal_ends_reading_and_loses_no_line(client: KinesisClient, stream: str, kinesis_url: str) -> None:
    source = f"kinesis://{stream}?region=eu-west-1&endpoint={kinesis_url}"
    process = subprocess.Popen(
        [*COMMAND, "produce", source, "--key", "fixed:k", "--linger-ms", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    while not (stored_data := [record.data for record in stored(client, stream)]):
        pass  # Wait until the line is stored.
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, stored_data, output.split(b",")[0]) == (0, [b"one"], b"1 records written")


def _line(data: bytes, **fields: str) -> bytes:
    return json.dumps({"data": base64.b64encode(data).decode()} | fields).encode() + b"\n"


AGGREGATE = packed([("a", None, b"1"), ("b", "7", b"2")])[0].encode()


def test_records_are_deaggregated_line_by_line() -> None:
    lines = _line(AGGREGATE, partition_key="x", sequence_number="5") + _line(b"plain", partition_key="y")
    status, out, err = _leasehold("deaggregate", stdin=lines)
    rows = [
        {
            "data": "MQ==",
            "partition_key": "a",
            "explicit_hash_key": None,
            "sequence_number": "5",
            "sub_sequence_number": 0,
            "aggregated": True,
        },
        {
            "data": "Mg==",
            "partition_key": "b",
            "explicit_hash_key": "7",
            "sequence_number": "5",
            "sub_sequence_number": 1,
            "aggregated": True,
        },
        {
            "data": "cGxhaW4=",
            "partition_key": "y",
            "explicit_hash_key": None,
            "sequence_number": None,
            "sub_sequence_number": 0,
            "aggregated": False,
        },
    ]
    assert (status, [json.loads(line) for line in out.splitlines()]) == (0, rows)
    assert err == (
        "Kinesis records: 1 aggregated, 1 plain. User records dropped: none. "
        "Read by plain Python, which is slow: this leasehold is not compiled.\n"
    )


def test_record_dropped_by_the_range_is_counted() -> None:
    line = _line(AGGREGATE)
    command = ("deaggregate", "--hash-range", "0", "9", "--json")
    status, out, err = _leasehold(*command, "--misplaced", "drop", stdin=line)
    assert (status, out) == (0, "")
    assert json.loads(err) == {"records": {"out-of-range": 1}, "dropped": {"out-of-range": 2}, "compiled": False}
    status, out, err = _leasehold(*command, stdin=line)
    (row,) = map(json.loads, out.splitlines())
    assert (status, row["data"], row["sub_sequence_number"]) == (0, "Mg==", 1)
    assert json.loads(err) == {"records": {"out-of-range": 1}, "dropped": {"out-of-range": 1}, "compiled": False}


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--strict"], _line(AGGREGATE[:-1]), "line 1: bad-md5"),
        ([], _line(b"x") + b"{}\n", "line 2: data: needs an object"),
        ([], b"nonsense\n", "line 1: not JSON"),
        ([], b"[" * 20_000 + b"\n", "line 1: not JSON"),
        ([], b'{"data": "!"}\n', "line 1: data: not base64"),
        ([], '{"data": "\u00e9"}\n'.encode(), "line 1: data: not base64"),
        ([], b'{"data": "", "partition_key": "\\ud800"}\n', "line 1: partition_key: needs a string"),
        ([], b'{"data": "", "sequence_number": 5}\n', "line 1: sequence_number: needs a string"),
        (["--hash-range", "9", "0"], b"", "--hash-range: the first hash key is above the last"),
        (["--hash-range", "0", "x"], b"", "--hash-range: needs two decimal numbers"),
        (["--hash-range", "0", "9" * 5000], b"", "--hash-range: needs two decimal numbers"),
        (["/no/such/file"], b"", "/no/such/file"),
    ],
)
def test_bad_lines_and_options_are_named(arguments: list[str], stdin: bytes, message: str) -> None:
    status, _, err = _leasehold("deaggregate", *arguments, stdin=stdin)
    assert (status, message in err) == (2, True)
