"""Readers of a table's stream get scripted responses from a client without a network."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import Factory, define
from botocore.exceptions import ClientError, ParamValidationError, ReadTimeoutError
from waiters import Clock

from leasehold.adapters.sources import dynamodb_streams
from leasehold.adapters.sources.changes import decode_change
from leasehold.adapters.sources.dynamodb_streams import ChangePoller, StreamsClients, TableClients, TableStream
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.errors import SourceError, Trimmed

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"
FIRST_NUMBER = 10**20
CREATED_AT = 1_800_000_000


def number(index: int) -> str:
    return str(FIRST_NUMBER + index)


def change_row(index: int, created_at: int | None = CREATED_AT) -> dict[str, Any]:
    """Return the change with this index as boto3 returns it."""
    details: dict[str, Any] = {"Keys": {"id": {"S": f"i-{index}"}}, "SequenceNumber": number(index)}
    if created_at is not None:
        details["ApproximateCreationDateTime"] = datetime.fromtimestamp(created_at, UTC)
    return {"eventName": "INSERT", "dynamodb": details}


def response(*rows: dict[str, Any], date: str = "", ended: bool = False) -> dict[str, Any]:
    headers = {"ResponseMetadata": {"HTTPHeaders": {"date": date} if date else {}}}
    return {"Records": list(rows), **headers} | ({} if ended else {"NextShardIterator": "i"})


def rejection(code: str) -> ClientError:
    error: Any = {"Error": {"Code": code, "Message": "as the test wants it"}}
    return ClientError(error, "GetRecords")


@define
class ScriptedService:
    """A service that gives these responses to GetRecords, in order. Errors are raised.

    iterators          the responses to the first requests for an iterator
    iterator_requests  the parameters of each request for an iterator
    """

    responses: list[dict[str, Any] | Exception]
    iterators: list[dict[str, Any] | Exception] = Factory(list)
    iterator_requests: list[dict[str, Any]] = Factory(list)

    def get_shard_iterator(self, **parameters: object) -> dict[str, Any]:
        self.iterator_requests.append(parameters)
        return _return_or_raise(self.iterators.pop(0) if self.iterators else {})

    def get_records(self, **_parameters: object) -> dict[str, Any]:
        return _return_or_raise(self.responses.pop(0))

    def open(self, start: Position = TRIM_HORIZON, **options: Any) -> ChangePoller:  # noqa: ANN401  any option
        clients = StreamsClients(lambda _timeout: self)
        return TableStream(clients, ARN, clients, clock=Clock(), **options).open(Lease("s-0"), start)


def _return_or_raise(answer: dict[str, Any] | Exception) -> dict[str, Any]:
    if isinstance(answer, Exception):
        raise answer
    return {"ShardIterator": "i", **answer}


def indices(batch: Batch) -> list[int]:
    return [int(record.sequence_number) - FIRST_NUMBER for record in batch.records]


@pytest.mark.parametrize("empty_responses", [0, 1, 3])
def test_new_iterator_continues_after_the_last_change(empty_responses: int) -> None:
    service = ScriptedService(
        [response(change_row(1)), *[response()] * empty_responses, rejection("ExpiredIteratorException"), response()]
    )
    poller = service.open()
    for _ in range(empty_responses + 3):
        poller.read()
    assert service.iterator_requests[1:] == [
        {
            "StreamArn": ARN,
            "ShardId": "s-0",
            "ShardIteratorType": "AFTER_SEQUENCE_NUMBER",
            "SequenceNumber": number(1),
        }
    ]


@pytest.mark.parametrize("start", [TRIM_HORIZON, at_timestamp(CREATED_AT * 1000), Position(number(1))])
@pytest.mark.parametrize("empty_responses", [0, 1])
def test_reader_whose_last_change_was_trimmed_fails(start: Position, empty_responses: int) -> None:
    """Changes that a reader has not seen are never skipped without an error, wherever the reader started."""
    rows = response(change_row(1), change_row(2))
    service = ScriptedService([rows, *[response()] * empty_responses, rejection("TrimmedDataAccessException")])
    poller = service.open(start)
    for _ in range(empty_responses + 1):
        poller.read()
    with pytest.raises(Trimmed, match=number(2)):
        poller.read()


def test_changes_restart_the_count_of_empty_responses() -> None:
    empty = [response()] * 2
    service = ScriptedService([*empty, response(change_row(1)), *empty, response()])
    poller = service.open()
    assert [poller.read().behind_seconds for _ in range(6)] == [None] * 5 + [0.0]


def test_end_of_a_shard_is_its_tip() -> None:
    batch = ScriptedService([response(ended=True)]).open().read()
    assert (batch.ended, batch.behind_seconds) == (True, 0.0)


@pytest.mark.parametrize(
    ("seconds", "behind", "pause"), [(-1, 0.0, 0.5), (0, 0.0, 0.5), (2, 2.0, 0.5), (3, 3.0, 0.25), (90, 90.0, 0.25)]
)
def test_lag_is_the_age_of_the_last_change_and_never_negative(seconds: int, behind: float, pause: float) -> None:
    """A reader that is behind makes its next request sooner."""
    date = datetime.fromtimestamp(CREATED_AT + seconds, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    rows = change_row(1, CREATED_AT - 500), change_row(2)
    batch = ScriptedService([response(*rows, date=date)]).open().read()
    assert (batch.behind_seconds, batch.wait_seconds) == (behind, pause)


def test_changes_before_the_start_time_count_as_read() -> None:
    """The checkpoint moves past dropped changes, and a change without a time is never dropped."""
    service = ScriptedService(
        [
            response(change_row(1, CREATED_AT - 120), change_row(2, CREATED_AT - 120)),
            response(change_row(3, CREATED_AT - 120)),
            response(change_row(4, None), change_row(5, CREATED_AT - 120)),
        ],
        [rejection("ValidationException")],
    )
    poller = service.open(at_timestamp(CREATED_AT * 1000))
    batches = [poller.read() for _ in range(3)]
    assert [indices(batch) for batch in batches] == [[], [], [4, 5]]
    assert [batch.read_to for batch in batches] == [Position(number(index)) for index in (2, 3, 5)]


@pytest.mark.parametrize("fault", [rejection("ValidationException"), ParamValidationError(report="unknown type")])
def test_only_a_time_is_replaced_if_the_service_rejects_a_start(fault: Exception) -> None:
    """A reader with a checkpoint never starts again at the oldest change, which would repeat a whole day."""
    service = ScriptedService([response(change_row(1))], [fault])
    assert indices(service.open(at_timestamp(CREATED_AT * 1000)).read()) == [1]
    assert [parameters["ShardIteratorType"] for parameters in service.iterator_requests] == [
        "AT_TIMESTAMP",
        "TRIM_HORIZON",
    ]
    service = ScriptedService([response(change_row(1))], [fault])
    poller = service.open(Position(number(1)))
    try:
        batch = poller.read()
    except SourceError:
        return
    assert (batch.records, bool(batch.fault)) == ((), True)


@pytest.mark.parametrize("code", ["ValidationException", "ResourceNotFoundException", "AccessDeniedException"])
def test_rejected_start_is_not_taken_for_a_trimmed_one(code: str) -> None:
    service = ScriptedService([response(change_row(1))], [rejection(code)])
    with pytest.raises(SourceError) as exc_info:
        service.open(Position(number(1)), rewind=True).read()
    assert not isinstance(exc_info.value, Trimmed)
    assert len(service.iterator_requests) == 1


def test_poll_seconds_is_the_pause_of_every_reader() -> None:
    service = ScriptedService([response(change_row(1)), response(change_row(2))])
    poller = service.open(poll_seconds=7.0)
    assert [poller.read().wait_seconds for _ in range(2)] == [7.0, 7.0]


@pytest.mark.parametrize("member", ["PrincipalId", "principalId"])
def test_expired_item_names_the_service_that_removed_it(member: str) -> None:
    row = change_row(1, None) | {"userIdentity": {member: "dynamodb.amazonaws.com", "Type": "Service"}}
    assert decode_change(json.dumps(row).encode()).by == "dynamodb.amazonaws.com"


def test_both_services_of_a_stream_get_the_options_of_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[tuple[Any, ...]] = []
    session = SimpleNamespace()
    monkeypatch.setattr(dynamodb_streams, "create_boto3_session", lambda *_arguments: session)
    monkeypatch.setattr(dynamodb_streams, "create_client", lambda *arguments: created.append(arguments))
    for name, option, region in (
        ("orders", "region=eu-north-1&", "eu-north-1"),
        (ARN, "region=eu-north-1&", "eu-north-1"),
        (ARN, "", "eu-west-1"),
    ):
        created.clear()
        source = cast("TableStream", open_source(f"dynamodb-streams://{name}?{option}endpoint=http://there:8000"))
        source._table_clients.client_with_timeout(5.0)  # noqa: SLF001  made when it is first needed
        assert created == [
            (service, region, "http://there:8000", 5.0, session) for service in ("dynamodbstreams", "dynamodb")
        ]


@define
class SlowService:
    """A service that responds to each request after `delay` seconds of a simulated clock, and notes the timeouts."""

    clock: Clock = Factory(Clock)
    delay: float = 0.1
    operation_timeouts: list[tuple[str, float]] = Factory(list)
    closed: list[float] = Factory(list)

    def client(self, timeout: float) -> "_SlowClient":
        return _SlowClient(self, timeout)

    def stream(self, name: str = "orders") -> TableStream:
        clients = StreamsClients(self.client, clock=self.clock, start=_run_at_once)
        return TableStream(clients, name, TableClients(self.client, clock=self.clock), clock=self.clock)

    def timeouts(self, operation: str) -> list[float]:
        return [timeout for asked_operation, timeout in self.operation_timeouts if asked_operation == operation]


def _run_at_once(work: Callable[[], None]) -> None:
    work()


@define
class _SlowClient:
    service: SlowService
    timeout: float

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(**_parameters: object) -> object:
            self.service.operation_timeouts.append((operation, self.timeout))
            self.service.clock.now += min(self.service.delay, self.timeout)
            if self.service.delay > self.timeout:
                raise ReadTimeoutError(endpoint_url="there")
            return {
                "describe_table": {"Table": {"LatestStreamArn": ARN}},
                "describe_stream": {
                    "StreamDescription": {
                        "Shards": [],
                        "TableName": "orders",
                        "CreationRequestDateTime": datetime.fromtimestamp(CREATED_AT, UTC),
                    },
                    "ResponseMetadata": {"HTTPHeaders": {}},
                },
                "get_shard_iterator": {"ShardIterator": "i"},
                "get_records": response(),
            }[operation]

        return call

    def close(self) -> None:
        self.service.closed.append(self.timeout)


def test_first_requests_wait_for_a_slow_service() -> None:
    service = SlowService(delay=12.0)
    service.stream().shards()
    assert [service.timeouts(name) for name in ("describe_table", "describe_stream")] == [[5.0, 10.0, 20.0]] * 2


def test_readers_start_with_the_timeout_that_sufficed_for_the_listing() -> None:
    service = SlowService(delay=12.0)
    stream = service.stream()
    stream.shards()
    stream.open(Lease("s-0"), TRIM_HORIZON).read()
    assert service.timeouts("get_shard_iterator") == [20.0]


def test_close_closes_the_clients_of_both_services_once() -> None:
    service = SlowService()
    stream = service.stream()
    stream.shards()
    for _ in range(2):
        stream.close()
    assert service.closed == [5.0, 5.0]
