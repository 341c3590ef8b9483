"""Lambda functions as handlers: the event and the context of each call, and how its response is interpreted."""

import asyncio
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_harness import ReaderHarness, data
from virtual_fleet import four_shards
from waiters import until

import leasehold
from leasehold import Delivery, Record
from leasehold.adapters.consuming import check_consumption_options, load_function
from leasehold.adapters.lambda_handlers import (
    FunctionSettings,
    LambdaFunction,
    ReportedFailure,
    find_first_failed,
    make_lambda_events,
    parse_function_settings,
)
from leasehold.adapters.options import Options
from leasehold.adapters.sources.dynamodb_streams import convert_record
from leasehold.balancer.model import Position
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

ARN = "arn:aws:kinesis:us-east-2:111122223333:stream/lambda-stream"
REPORTING = parse_function_settings("lambda:app.handler?report_batch_item_failures=true")
PLAIN = parse_function_settings("lambda:app.handler")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because some functions fail on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# Events have the form that the documentation of Lambda shows.


def test_kinesis_event_has_the_published_form() -> None:
    """The event of a batch of Kinesis records equals the service's published example, field by field."""
    sequence_number = "49590338271490256608559692538361571095921575989136588898"
    records = [Record(b"Hello, this is a test.", sequence_number, partition_key="1", arrived=1545084650.987)]
    role = "arn:aws:iam::111122223333:role/lambda-role"
    assert make_lambda_events(records, shard="shardId-000000000006", arn=ARN, role=role) == [
        {
            "kinesis": {
                "kinesisSchemaVersion": "1.0",
                "partitionKey": "1",
                "sequenceNumber": sequence_number,
                "data": "SGVsbG8sIHRoaXMgaXMgYSB0ZXN0Lg==",
                "approximateArrivalTimestamp": 1545084650.987,
            },
            "eventSource": "aws:kinesis",
            "eventVersion": "1.0",
            "eventID": f"shardId-000000000006:{sequence_number}",
            "eventName": "aws:kinesis:record",
            "invokeIdentityArn": role,
            "awsRegion": "us-east-2",
            "eventSourceARN": ARN,
        }
    ]


TABLE_ARN = "arn:aws:dynamodb:us-east-1:123456789012:table/Example-Table/stream/2016-12-01T00:00:00.000"


def test_dynamodb_event_has_the_published_form() -> None:
    """The event of a change equals the published example. The API returns bytes, datetimes and other capitalization."""
    change: dict[str, Any] = {
        "ApproximateCreationDateTime": 1480642020,
        "Keys": {"key": {"S": "binary"}},
        "NewImage": {"key": {"S": "binary"}, "asdf1": {"B": "AAEqQQ=="}, "asdf2": {"BS": ["AAEqQQ==", "QSoBAA=="]}},
        "SequenceNumber": "1405400000000002063282832",
        "SizeBytes": 54,
        "StreamViewType": "NEW_AND_OLD_IMAGES",
    }
    published = {
        "eventID": "f07f8ca4b0b26cb9c4e5e77e69f274ee",
        "eventName": "INSERT",
        "eventVersion": "1.1",
        "eventSource": "aws:dynamodb",
        "awsRegion": "us-east-1",
        "userIdentity": {"type": "Service", "principalId": "dynamodb.amazonaws.com"},
        "dynamodb": change,
        "eventSourceARN": TABLE_ARN,
    }
    image = {"key": {"S": "binary"}, "asdf1": {"B": b"\0\1*A"}, "asdf2": {"BS": [b"\0\1*A", b"A*\1\0"]}}
    created_at = datetime.fromtimestamp(1480642020, UTC)
    row = {name: published[name] for name in published if name != "eventSourceARN"} | {
        "userIdentity": {"Type": "Service", "PrincipalId": "dynamodb.amazonaws.com"},
        "dynamodb": change | {"NewImage": image, "ApproximateCreationDateTime": created_at},
    }
    assert make_lambda_events([convert_record(row)], shard="shardId-1", arn=TABLE_ARN) == [published]


# Responses


@pytest.mark.parametrize(
    ("response", "failed"),
    [
        (None, None),
        ({}, None),
        ("", None),
        ([], None),
        ({"statusCode": 200}, None),
        ({"batchItemFailures": None}, None),
        ({"batchItemFailures": []}, None),
        ({"batchItemFailures": [{"itemIdentifier": "8"}]}, 1),
        ({"batchItemFailures": [{"itemIdentifier": "10"}, {"itemIdentifier": "8"}]}, 1),
        ({"batchItemFailures": [{"itemIdentifier": "8"}, {"itemIdentifier": "8"}]}, 1),
        ({"batchItemFailures": [{"itemIdentifier": "7"}]}, 0),
        ({"batchItemFailures": [{"itemIdentifier": "9"}]}, 2),
    ],
)
def test_lowest_reported_record_is_the_first_failed(response: object, failed: int | None) -> None:
    """The first failed record is the one with the lowest reported sequence number. An empty response means success."""
    assert find_first_failed(response, ["7", "8", "9", "9", "10"]) == failed


@pytest.mark.parametrize(
    "response",
    [
        {"batchItemFailures": [{"itemIdentifier": ""}]},
        {"batchItemFailures": [{"itemIdentifier": None}]},
        {"batchItemFailures": [{"itemIdentifier": "8"}, {"itemIdentifier": "6"}]},
        {"batchItemFailures": [{"itemIdentifier": 8}]},
        {"batchItemFailures": [{"itemidentifier": "8"}]},
        {"batchItemFailures": ["8"]},
        {"batchItemFailures": {"itemIdentifier": "8"}},
        {"batchItemFailures": "8"},
        ["8"],
        "ok",
        False,
    ],
)
def test_malformed_response_fails_the_whole_batch(response: object) -> None:
    with pytest.raises(ReportedFailure):
        find_first_failed(response, ["7", "8", "9"])


@define
class Function:
    """A Lambda function that records the data of each call. The test defines its responses."""

    answer: Callable[[list[bytes]], object]
    calls: list[list[bytes]] = field(factory=list)
    contexts: list[Any] = field(factory=list)

    def __call__(self, event: Any, context: Any) -> object:  # noqa: ANN401  as Lambda calls it
        rows = event["Records"]
        self.contexts.append(context)
        self.calls.append(data_of(rows))
        return self.answer(self.calls[-1])


def data_of(rows: list[Any]) -> list[bytes]:
    """Return the data of an event's records, as `create_records` numbers them."""
    return [
        str(int(row["kinesis"]["sequenceNumber"]) - int(create_records(1)[0].sequence_number)).encode() for row in rows
    ]


def reported(*numbers: int) -> dict[str, list[dict[str, str]]]:
    """Return the response that reports these records as failed."""
    return {
        "batchItemFailures": [{"itemIdentifier": create_records(1, number)[0].sequence_number} for number in numbers]
    }


def handled_by(
    lambda_handler: Function, function_settings: FunctionSettings = REPORTING, count: int = 6
) -> ReaderHarness:
    """Return a harness whose shard has one batch of `count` records, and whose handler is this function."""
    return ReaderHarness(
        ShardRecords(create_records(count)), on_batch=LambdaFunction(lambda_handler, function_settings, 30.0)
    )


def test_partial_failure_is_repeated_from_the_failed_record() -> None:
    """The checkpoint moves to just before the lowest failed record. That record and all later ones are repeated."""
    responses = iter([reported(4, 2), reported(4), None])
    function = Function(lambda _records: next(responses))
    harness = handled_by(function)
    reader = harness.reading()
    harness.steps(reader, 2)
    assert harness.store.row("s-0").checkpoint == Position("101")
    harness.steps(reader, 4)
    assert function.calls == [data(6), data(4, 2), data(2, 4)]
    assert harness.store.row("s-0").checkpoint == Position("105")


def test_any_response_succeeds_without_partial_failure_reports() -> None:
    """A function may return anything unless it is configured to report partial failures."""
    function = Function(lambda _records: reported(2))
    harness = handled_by(function, PLAIN)
    harness.steps(harness.reading(), 3)
    assert function.calls == [data(6)]
    assert harness.store.row("s-0").checkpoint == Position("105")


def test_only_the_poisoned_record_is_dead_lettered() -> None:
    dead_lettered: list[bytes] = []
    poison = b"3"
    function = Function(lambda batch_data: reported(3) if poison in batch_data else None)
    harness = handled_by(function)

    def dead_letter(delivery: Delivery, _error: Exception) -> None:
        dead_lettered.extend(record.data for record in delivery.records)

    harness.steps(harness.reading(attempts=2, dead_letter=dead_letter), 16)
    assert dead_lettered == [poison]
    assert function.calls == [data(6), data(3, 3), data(3, 3), data(2, 3), data(1, 3), data(1, 4), data(1, 5)]
    assert harness.store.row("s-0").checkpoint == Position("105")


def test_attempts_restart_when_a_function_gets_further() -> None:
    """With three retries, Lambda calls a function four times after the call that first reached the failing record."""
    dead_lettered: list[int] = []
    function = Function(lambda given_now: reported(2) if b"2" in given_now else None)
    harness = handled_by(function, count=3)
    harness.steps(
        harness.reading(attempts=4, dead_letter=lambda batch, _error: dead_lettered.append(batch.attempts)), 12
    )
    assert function.calls == [data(3), *[data(1, 2)] * 4]
    assert dead_lettered == [4]


@given(
    count=st.integers(1, 8),
    reports=st.lists(st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.just("raise"))),
)
@settings(max_examples=60)
def test_no_reported_failure_passes_over_a_record(count: int, reports: list[Any]) -> None:
    """Whatever the responses, each call begins with the first record that is not done."""
    handled_count, remaining_reports = 0, iter(reports)

    def respond(batch_data: list[bytes]) -> object:
        nonlocal handled_count
        assert batch_data == data(count - handled_count, handled_count)
        match next(remaining_reports, None):
            case None:
                handled_count = count
                return None
            case "raise":
                raise ValueError("fault")
            case numbers:
                if set(numbers) <= set(range(handled_count, count)):
                    handled_count = min(numbers)
                return reported(*numbers)

    harness = handled_by(Function(respond), count=count)
    reader = harness.reading(attempts=1000)
    for _ in range(100):
        assert harness.holding.renew()
        harness.steps(reader, 1)
        if handled_count == count:
            break
    assert handled_count == count
    harness.steps(reader, 1)
    assert harness.store.row("s-0").checkpoint == Position(str(99 + count))


@pytest.mark.parametrize("raised", [ValueError("fault"), SystemExit(1), asyncio.CancelledError()])
def test_exception_fails_the_batch_and_not_the_worker(raised: BaseException) -> None:
    """On Lambda, an exit ends only one invocation. Here, it must not end a worker that also reads other shards."""
    faults = [raised]

    def raise_once(_records: list[bytes]) -> None:
        if faults:
            raise faults.pop()

    function = Function(raise_once)
    harness = handled_by(function)
    harness.steps(harness.reading(), 4)
    assert function.calls == [data(6), data(6)]
    assert harness.store.row("s-0").checkpoint == Position("105")


def test_coroutine_is_not_a_response() -> None:
    async def later() -> None:
        raise AssertionError

    responses = iter([later(), None])
    function = Function(lambda _records: next(responses))
    harness = handled_by(function, PLAIN)
    harness.steps(harness.reading(), 4)
    assert function.calls == [data(6), data(6)]


# Calls


def test_context_has_the_fields_of_lambda_and_counts_down() -> None:
    """The remaining time, by which functions decide to stop early, counts down from `handler_seconds`."""
    clock_times = [100.0]
    function = LambdaFunction(
        Function(lambda _records: None), evolve(PLAIN, name="orders"), 30.0, lambda: clock_times[0]
    )
    function.use_source_arns(SourceWithArn())
    harness = ReaderHarness(ShardRecords(create_records(2)), on_batch=function)
    harness.steps(harness.reading(), 2)
    context = function.function.contexts[0]  # type: ignore[attr-defined]  # It is a `Function`.
    clock_times[0] = 101.5
    assert context.get_remaining_time_in_millis() == 28500
    clock_times[0] = 200.0
    assert context.get_remaining_time_in_millis() == 0
    assert (context.function_name, context.function_version, context.memory_limit_in_mb) == ("orders", "$LATEST", "128")
    assert context.invoked_function_arn == "arn:aws:lambda:us-east-2:111122223333:function:orders"
    assert (context.log_group_name, context.client_context) == ("/aws/lambda/orders", None)
    assert context.identity.cognito_identity_id is None
    assert len(context.aws_request_id) == 36


class SourceWithArn(ListSource):
    """A source whose stream has an ARN."""

    def arn(self, _stream: str) -> str:
        return ARN


def test_function_finds_one_event_loop_in_every_call() -> None:
    """A client that was created in the event loop of the first call still works in the second call."""
    loops: list[asyncio.AbstractEventLoop] = []

    def record_event_loop(_records: list[bytes]) -> None:
        loop = asyncio.get_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        loops.append(loop)

    function = LambdaFunction(Function(record_event_loop), PLAIN, 30.0)
    for _ in range(2):
        harness = ReaderHarness(ShardRecords(create_records(2)), on_batch=function)
        thread = Thread(target=harness.steps, args=(harness.reading(), 2))  # Workers call handlers in other threads.
        thread.start()
        thread.join()
    assert len(loops) == 2
    assert loops[0] is loops[1]


APP = """
import os, threading
import {shared} as shared

IMPORTED = os.environ.get("AWS_LAMBDA_FUNCTION_NAME")

def handler(event, context):
    shared.called(event, context, IMPORTED)
    return {{"statusCode": 200}}

async def awaiting(event, context):
    pass

def of_three(event, context, more):
    pass
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Returns the name of a module with Lambda functions, in the current folder."""
    name = f"app_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP.format(shared=__name__))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


CALLS = Lock()
OVERLAPS: list[bool] = []
CALL_SIZES_AND_NAMES: list[tuple[int, str | None]] = []


def called(event: Any, _context: Any, imported: str | None) -> None:  # noqa: ANN401  as Lambda calls it
    """Record the call, and whether another call was running at the same time."""
    OVERLAPS.append(not CALLS.acquire(blocking=False))
    for _ in range(100):
        os.sched_yield()
    CALL_SIZES_AND_NAMES.append((len(event["Records"]), imported))
    CALLS.release()


def test_calls_in_one_process_run_one_at_a_time(app: str) -> None:
    """Functions keep state between calls, so concurrent calls for several shards could corrupt that state."""
    OVERLAPS.clear()
    CALL_SIZES_AND_NAMES.clear()
    shards = four_shards()
    source = ListSource(shards, {shard.id: ShardRecords(create_records(250), size=250, ended=True) for shard in shards})
    options = Options(initial_position="TRIM_HORIZON", checkpoint_seconds=0)
    with leasehold.worker(source, f"lambda:{app}.handler", leases=f"memory://{app}", **options):
        until(lambda: sum(count for count, _ in CALL_SIZES_AND_NAMES) == 1000, "all shards are handled")
    assert not any(OVERLAPS)
    assert {count for count, _ in CALL_SIZES_AND_NAMES} == {100, 50}
    assert {imported for _, imported in CALL_SIZES_AND_NAMES} == {os.environ.get("AWS_LAMBDA_FUNCTION_NAME")}


def test_runtime_variables_are_set_on_request_before_the_import(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read these variables when they are imported, and conclude that they are running on Lambda."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    consumption = check_consumption_options(
        ListSource(), "memory://variables", f"lambda:{app}.handler?environment=true&name=orders", {}
    )
    assert sys.modules[app].IMPORTED == "orders"
    assert os.environ["AWS_LAMBDA_FUNCTION_VERSION"] == "$LATEST"
    assert os.environ["_HANDLER"] == f"{app}.handler"
    assert (consumption.handling.max_records, consumption.handling.most_calls) == (100, 1)


def test_mapping_passes_aggregates_whole_by_default(app: str) -> None:
    """A function that was written for Lambda deaggregates records by itself."""
    for url, opened_url in (
        ("kinesis://orders", "kinesis://orders?aggregates=whole"),
        ("kinesis://orders?region=eu-west-1", "kinesis://orders?region=eu-west-1&aggregates=whole"),
        ("kinesis://orders?aggregates=records", "kinesis://orders?aggregates=records"),
        ("dynamodb-streams://carts", "dynamodb-streams://carts"),
    ):
        assert check_consumption_options(url, "memory://x", f"lambda:{app}.handler", {}).source == opened_url


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "lambda:handle",
            "is not of the form lambda:file.function; lambda: names a Lambda function, so rename a module",
        ),
        ("lambda:", "is not of the form lambda:file.function"),
        ("lambda:{app}:handler", "is not of the form lambda:file.function"),
        ("lambda:..handler", "is not of the form lambda:file.function"),
        ("lambda:{app}.handler?report=true", "unknown option 'report'"),
        ("lambda:{app}.handler?environment=1", "option 'environment' must be true or false"),
        ("lambda:{app}.handler?memory=much", "option 'memory' must be a number"),
        ("lambda:{app}.handler?name=", "option 'name' must have one value"),
        ("lambda:{app}.handler?name=a&name=b", "option 'name' must have one value"),
        ("lambda:{app}.nothing", "has no function 'nothing'"),
        ("lambda:no_such.handler", "there is no module 'no_such' here"),
        ("lambda:{app}.awaiting", "Lambda's Python runtime does not await an `async def`"),
        ("lambda:{app}.of_three", "it is called with (event, context), and that does not fit"),
    ],
)
def test_function_that_cannot_be_called_is_rejected_at_start(app: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_consumption_options(ListSource(), "memory://x", text.format(app=app), {})


def test_event_hub_has_no_mapping(app: str) -> None:
    with pytest.raises(ValueError, match="kinesis:// and dynamodb-streams://"):
        check_consumption_options("eventhubs://n/h", "memory://x", f"lambda:{app}.handler", {})


def test_lambda_prefix_is_for_handlers_only() -> None:
    """A Lambda function cannot be a dead letter. A module cannot be named `lambda`, which is a Python keyword."""
    with pytest.raises(ValueError, match="rename a module that is called lambda"):
        load_function("lambda:app.handler")


def test_file_named_lambda_can_be_imported(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{app}.py").rename("lambda.py")
    monkeypatch.delitem(sys.modules, "lambda", raising=False)
    consumption = check_consumption_options(ListSource(), "memory://x", "lambda:lambda.handler", {})
    assert consumption.function is not None
    assert (consumption.function.settings.target, consumption.function.settings.name) == ("lambda:handler", "lambda")


def test_slashes_in_the_handler_name_are_packages(app: str) -> None:
    assert parse_function_settings("lambda:src/app.handler").target == "src.app:handler"
    assert (app, PLAIN.name) == (app, "app")


def test_call_without_a_limit_has_the_fifteen_minutes_of_lambda() -> None:
    function = Function(lambda _records: None)
    LambdaFunction(function, PLAIN, math.inf, lambda: 100.0).call_and_find_failure("s-0", "", create_records(1))
    assert function.contexts[0].get_remaining_time_in_millis() == 900_000


def test_function_that_closes_its_event_loop_gets_another_one() -> None:
    def run_and_close(_records: list[bytes]) -> None:
        loop = asyncio.get_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    function = LambdaFunction(Function(run_and_close), PLAIN, 30.0)
    for _ in range(2):
        function.call_and_find_failure("s-0", "", create_records(1))
