"""Provides hooks with which a boto3 client sends its requests in CBOR and parses the records in responses.

Credentials, signing, endpoints, retries, proxies and errors are left to boto3. Only the records, which make up most of
a response, are parsed here, by compiled libraries. The rest of a response is passed to boto3 as JSON, so that boto3
still interprets child shards, unusual numbers and errors. Subscriptions bypass boto3's event stream, which would parse
each record in Python. A producer's records are sent in CBOR, and bypass boto3's serializer, which would encode them in
base64.

Rule 1: The content type of a response determines how it is parsed. The format of the request does not matter.

Rule 2: If a service responds to CBOR in JSON, rejects it, or sends something that cannot be parsed, all later requests
are in JSON. This is logged once.

Rule 3: A failed request counts as a rejection of CBOR only if two conditions are met. The service has never responded
in CBOR, and the same request in JSON, which is sent at once, has a different outcome.

Rule 4: A producer's records are sent in JSON until the service has responded in CBOR to a listing of shards, because
such a request can be repeated without harm.

Rule 5: A producer's records are sent again in JSON only if the whole request was rejected, so that none of them can
have been written.

If the service supports CBOR, calls that read or write records can bypass boto3 entirely (see `stores/aws_calls`). To do
this, `replace_read_methods` and `replace_put_methods` replace methods of the client. Nothing changes for its callers.
"""

import base64
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from struct import error as StructError  # noqa: N812  a class
from struct import pack
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import cbor2
import orjson
import pybase64
from botocore.eventstream import EventStreamBuffer, EventStreamMessage
from botocore.exceptions import EventStreamError
from botocore.parsers import ResponseParserError

from leasehold.adapters.sources.kinesis.faults import (
    CREDENTIALS_CODES,
    DENIED,
    SERVER_ERROR_STATUS,
    THROTTLED,
    TRANSIENT_CODES,
)
from leasehold.adapters.sources.kinesis.records import RowViews
from leasehold.stores.aws_calls.calls import DirectCalls
from leasehold.stores.deadlines import response_with_deadline
from leasehold.stores.printable import error_summary, make_safe_logger

SCAN: Any = None
"""The compiled parser, which creates no object per record, or None if only cbor2 is available."""
with suppress(ImportError):  # the parser is not compiled
    from leasehold.adapters.sources.kinesis.cbor import scan as SCAN  # noqa: N812  a module that may be none

if TYPE_CHECKING:  # the stubs are not installed for users
    from types_boto3_kinesis import KinesisClient

log = make_safe_logger(logging.getLogger("leasehold.kinesis"))


CBOR_CONTENT_TYPE = "application/x-amz-cbor-1.1"

Row = dict[str, Any]
"""A record as the service sends it, but with bytes as its data. Its time is a number (see `parse_record_time`)."""

ResponseRows = RowViews | list[Row]


_PLAIN_TYPES = {"NextShardIterator": str, "MillisBehindLatest": int}
_KNOWN_FIELDS = {*_PLAIN_TYPES, "ChildShards"}


_UNDEFINED = b"\xf7"


class UnreadableBody(Exception):
    """The body is not a valid response of Kinesis in this format."""


def is_cbor(content_type: object) -> bool:
    """Return whether a Content-Type means CBOR. The Content-Type of an event contains no version."""
    return isinstance(content_type, str) and "cbor" in content_type


def encode_cbor(value: object) -> bytes:
    """Encode a value as CBOR."""
    return cbor2.dumps(value)


def convert_json_to_cbor(body: bytes | str) -> bytes:
    """Convert the JSON of a request from boto3 to CBOR."""
    return encode_cbor(orjson.loads(body))


def convert_cbor_to_json(body: bytes) -> bytes:
    """Convert a body from CBOR to JSON. Raises UnreadableBody."""
    return _encode_json(parse_message(body, cbor=True))


def split_response(body: bytes, *, cbor: bool) -> tuple[ResponseRows, bytes]:
    """Return the rows of a response, and the rest of it in JSON.

    Raises:
        UnreadableBody: If the body cannot be parsed here. boto3 may still understand it.
    """
    rows, other_fields = _split_rows(body, cbor=cbor)
    return rows, _encode_json(other_fields)


def parse_response(body: bytes | bytearray) -> dict[str, Any] | None:
    """Parse a response in CBOR, without null values. Return None if boto3 must parse it.

    boto3 must parse a response with child shards, or with a field of an unexpected type.
    """
    try:
        rows, other_fields = _split_rows(body, cbor=True)
    except UnreadableBody:
        return None
    # Ignore unknown fields, as boto3 does, so that a new field of the service does not cause a second parse.
    fields = {name: value for name, value in other_fields.items() if value is not None and name in _KNOWN_FIELDS}
    has_known_types = all(type(value) is _PLAIN_TYPES.get(name) for name, value in fields.items())
    return {**fields, "Records": rows} if has_known_types else None


def parse_event(payload: bytes, *, cbor: bool) -> dict[str, Any]:
    """Parse an event of a fan-out subscription into the form of a response to GetRecords. Raises UnreadableBody."""
    rows, fields = _split_rows(payload, cbor=cbor)
    return {"Records": rows, **{name: value for name, value in fields.items() if value is not None}}


def parse_message(payload: bytes | bytearray, *, cbor: bool) -> dict[str, Any]:
    """Parse a message, which must be a map. Raises UnreadableBody."""
    message = _parse_body(payload, cbor=cbor)
    if not isinstance(message, dict):
        raise UnreadableBody("it is not a map")
    return message


def _split_rows(body: bytes | bytearray, *, cbor: bool) -> tuple[ResponseRows, Any]:
    """Return the rows, with data as bytes, and the remaining fields by name."""
    if cbor and SCAN is not None and (scan_result := SCAN.viewed(body)) is not None:
        *views, has_aggregates, begin, end = scan_result
        message = _parse_body(body[:begin] + _UNDEFINED + body[end:], cbor=True)
        if message.pop("Records") is cbor2.undefined:  # otherwise, another field has the same name
            return RowViews(body, cast("Any", views), SCAN.columns, has_aggregates=has_aggregates), message
    message = _parse_body(body, cbor=cbor)
    rows: list[Row] | None = message.pop("Records", None) if isinstance(message, dict) else None
    if not isinstance(rows, list):
        raise UnreadableBody("it has no list of records")
    try:
        for row in rows:
            if type(row["Data"]) is bytes:
                continue
            try:  # the data is base64 in JSON, and in the CBOR of some local services
                row["Data"] = pybase64.b64decode(row["Data"], validate=True)
            except ValueError:  # boto3 ignores characters outside the alphabet
                row["Data"] = base64.b64decode(row["Data"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableBody(f"it has a malformed record: {error_summary(error)}") from error
    return rows, message


def _parse_body(body: bytes | bytearray, *, cbor: bool) -> Any:  # noqa: ANN401  whatever the service wrote
    try:
        if not cbor:
            return orjson.loads(body)
        # Ignore the tag for times. In the standard it means seconds, but Kinesis sends milliseconds with or without it.
        return cbor2.loads(body, semantic_decoders={1: lambda value, _immutable: value})
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise UnreadableBody(f"it is not valid {'CBOR' if cbor else 'JSON'}: {error}") from error


def _encode_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=_encode_base64)
    except TypeError as error:
        raise UnreadableBody(f"it has a value that JSON cannot represent: {error}") from error


def _encode_base64(value: object) -> str:
    if isinstance(value, bytes):
        return pybase64.b64encode_as_string(value)
    raise TypeError(type(value).__name__)


_MAX_MESSAGE_BYTES = 25 << 20  # the limits of the service are lower
_PRELUDE_BYTES = 12  # the length of the message, the length of its headers, and a checksum of both


class Subscription:
    """The events of a subscription, in boto3's form.

    Args:
        response_body: The body of the response, which is read as it arrives.
        on_unreadable: Called with the reason if an event in CBOR cannot be parsed.

    Raises:
        ResponseParserError: If the body does not start like a subscription, as in boto3.
    """

    def __init__(self, response_body: Any, on_unreadable: Callable[[str], None]) -> None:  # noqa: ANN401  boto3 does not specify it
        self._raw_stream, self._on_unreadable = response_body, on_unreadable
        self._messages = _read_messages(response_body)
        first_message = next(self._messages, None)
        if first_message is None or _read_headers(first_message).get(":event-type") != "initial-response":
            raise ResponseParserError("First event was not of type initial-response")
        self.cbor = is_cbor(_read_headers(first_message).get(":content-type"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for message in self._messages:
            if _read_headers(message).get(":message-type") != "event":
                raise EventStreamError(_convert_error(message), "SubscribeToShard")
            if (name := _read_headers(message).get(":event-type")) == "SubscribeToShardEvent":
                yield {name: self._parse_event(message)}

    def close(self) -> None:
        """Close the connection."""
        self._raw_stream.close()

    def _parse_event(self, message: EventStreamMessage) -> dict[str, Any]:
        is_in_cbor = is_cbor(_read_headers(message).get(":content-type"))
        try:
            return parse_event(message.payload, cbor=is_in_cbor)
        except UnreadableBody as error:
            if is_in_cbor:
                self._on_unreadable(f"an event cannot be read: {error}")
            raise ResponseParserError(f"an event cannot be read: {error}") from error


class InitialResponse:
    """A body that boto3 takes for the beginning of a subscription in JSON. We parse the real body ourselves."""

    def stream(self) -> list[bytes]:
        """Return the whole body as one chunk."""
        return [_INITIAL]

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def _read_headers(message: EventStreamMessage) -> dict[str, Any]:
    headers: Any = message.headers  # the stubs type them as a number
    return dict(headers)


def _read_messages(response_body: Any) -> Iterator[EventStreamMessage]:  # noqa: ANN401  boto3 does not specify it
    """Yield each message when it is complete.

    Botocore's buffer validates the messages. We pass it only complete messages, because it copies its whole content
    with each chunk.
    """
    buffer, received_bytes, needed_bytes = EventStreamBuffer(), io.BytesIO(), _PRELUDE_BYTES
    if (deadline := response_with_deadline(response_body)) is not None:
        deadline.restart()
    for chunk in response_body.stream():
        received_bytes.write(chunk)
        if received_bytes.tell() < needed_bytes:
            continue
        data, begin = received_bytes.getvalue(), 0
        while (needed_bytes := _find_message_size(data, begin)) <= len(data) - begin:
            buffer.add_data(data[begin : begin + needed_bytes])
            try:
                messages = list(buffer)
            except (ArithmeticError, LookupError, StructError, TypeError, ValueError) as error:
                # The buffer does not translate errors caused by invalid headers.
                raise ResponseParserError(
                    f"an event has headers that cannot be read: {error_summary(error)}"
                ) from error
            yield from messages
            begin += needed_bytes
        received_bytes = io.BytesIO()
        received_bytes.write(data[begin:])
        if deadline is not None:  # start a new deadline for each event, so that only the time spent reading counts
            deadline.restart()


def _find_message_size(data: bytes, begin: int) -> int:
    """Return the length of the message that starts at `begin`, or that of a prelude if the prelude is damaged."""
    prelude = data[begin : begin + _PRELUDE_BYTES]
    if len(prelude) < _PRELUDE_BYTES or crc32(prelude[:8]) != int.from_bytes(prelude[8:]):
        return _PRELUDE_BYTES
    size = int.from_bytes(prelude[:4])
    # Any other size means that the message is damaged. With a size of 0 the caller would loop forever, and with a huge
    # size it would buffer the whole stream.
    return size if _PRELUDE_BYTES < size <= _MAX_MESSAGE_BYTES else _PRELUDE_BYTES


def _convert_error(message: EventStreamMessage) -> Any:  # noqa: ANN401  like the error of a service
    headers = _read_headers(message)
    if (code := headers.get(":exception-type")) is None:
        return {"Error": {"Code": headers.get(":error-code", ""), "Message": headers.get(":error-message", "")}}
    try:
        details = parse_message(message.payload, cbor=is_cbor(headers.get(":content-type")))
    except UnreadableBody:
        details = {}
    return {"Error": {"Code": code, "Message": details.get("message", details.get("Message", ""))}}


_INITIAL_HEADERS = b"".join(
    pack(">B", len(name)) + name + pack(">BH", 7, len(text)) + text
    for name, text in ((b":message-type", b"event"), (b":event-type", b"initial-response"))
)
_INITIAL_PRELUDE = pack(">II", len(_INITIAL_HEADERS) + 2 + 16, len(_INITIAL_HEADERS))
_INITIAL = _INITIAL_PRELUDE + pack(">I", crc32(_INITIAL_PRELUDE)) + _INITIAL_HEADERS + b"{}"
_INITIAL += pack(">I", crc32(_INITIAL))

JSON_CONTENT_TYPE = "application/x-amz-json-1.1"
FIRST_ERROR_STATUS = 300  # this status and all higher ones count as errors
_UNDERSTOOD_CODES = (
    THROTTLED | TRANSIENT_CODES | CREDENTIALS_CODES | DENIED | {"ResourceNotFoundException", "ExpiredIteratorException"}
)
"""Error codes which show that the service understood the request."""

EventFields = dict[str, Any]
"""The part of a boto3 event that its handlers may change."""

Handlers = dict[str, tuple[Callable[..., None], Callable[..., None]]]

UNREADABLE_KEY, _JSON_RETRY_KEY = "Unread", "leasehold repeats in JSON"


class CborHooks:
    """Chooses the format in which a client requests records, and parses the responses.

    Args:
        client: Any boto3 client. Handlers are registered with it.
        cbor: Whether to make requests in CBOR.
    """

    def __init__(self, client: "KinesisClient", *, cbor: bool) -> None:
        self._use_cbor = cbor
        self._confirmed_operations: set[str] = set()  # the operations with a response in CBOR
        self._lock = Lock()
        events = client.meta.events
        check_format = cast(
            "Callable[..., None]", self._check_format
        )  # the stubs do not know that its return value matters
        for operation, (encode, decode) in self._handlers_by_operation().items():
            events.register(f"before-call.kinesis.{operation}", encode)
            events.register(f"before-parse.kinesis.{operation}", decode)
            # Must run before boto3's own handler, which would wait before it retries.
            events.register_first(f"needs-retry.kinesis.{operation}", check_format)

    def uses_cbor(self, operation: str) -> bool:
        """Return whether requests of this operation are made in CBOR and had a response in CBOR."""
        return self._use_cbor and operation in self._confirmed_operations

    def _handlers_by_operation(self) -> Handlers:
        """Return the handlers that encode the requests and decode the responses of each operation."""
        return {
            "GetRecords": (self._encode_request, self._decode_response),
            "SubscribeToShard": (self._encode_request, self._decode_subscription),
        }

    def _encode_request(self, params: EventFields, **_event: object) -> None:
        # Send timestamps in JSON, because no local service let us verify their encoding in CBOR.
        if self._use_cbor and b"Timestamp" not in params["body"]:
            params["body"] = convert_json_to_cbor(params["body"])
            params["headers"]["Content-Type"] = CBOR_CONTENT_TYPE

    def _decode_response(
        self, response_dict: EventFields, customized_response_dict: EventFields, **_event: object
    ) -> None:
        if is_error_response(response_dict):
            return
        content_type, body = response_dict["headers"].get("content-type"), response_dict["body"]
        try:
            rows, response_dict["body"] = split_response(body, cbor=is_cbor(content_type))
        except UnreadableBody as error:
            if is_cbor(content_type):  # boto3 may still understand JSON
                customized_response_dict[UNREADABLE_KEY], response_dict["body"] = str(error), b"{}"
            return
        customized_response_dict["Records"] = rows

    def _decode_subscription(
        self, response_dict: EventFields, customized_response_dict: EventFields, **_event: object
    ) -> None:
        if not is_error_response(response_dict):
            customized_response_dict["EventStream"] = Subscription(response_dict["body"], self._use_json_from_now_on)
            response_dict["body"] = InitialResponse()

    def _check_format(self, response: Any, request_dict: EventFields, operation: Any, **_event: object) -> int | None:  # noqa: ANN401  boto3's own type
        """Return 0 to repeat the request in JSON without waiting, or None to let boto3 decide about a retry."""
        if response is None:
            return None
        http_response, parsed_response = response
        error_code = parsed_response.get("Error", {}).get("Code")
        if not is_cbor(request_dict["headers"]["Content-Type"]):
            reason, first_code = request_dict["context"].pop(_JSON_RETRY_KEY, ("", error_code))
            if error_code != first_code and http_response.status_code < SERVER_ERROR_STATUS:
                self._use_json_from_now_on(reason)
        elif UNREADABLE_KEY in parsed_response:
            return _retry_in_json(
                request_dict, f"its response cannot be read: {parsed_response[UNREADABLE_KEY]}", UNREADABLE_KEY
            )
        elif is_cbor(http_response.headers.get("content-type")) or getattr(
            parsed_response.get("EventStream"), "cbor", False
        ):
            self._confirmed_operations.add(operation.name)
        elif http_response.status_code < FIRST_ERROR_STATUS:
            self._use_json_from_now_on("it responds in JSON")
        elif operation.name not in self._confirmed_operations and error_code not in _UNDERSTOOD_CODES:
            return _retry_in_json(
                request_dict, f"it was rejected: {http_response.status_code} {error_code}", error_code
            )
        return None

    def _use_json_from_now_on(self, reason: str) -> None:
        with self._lock:
            is_logged, self._use_cbor = not self._use_cbor, False
        if not is_logged:
            log.warning("requests to Kinesis are in JSON from now on, and no longer in CBOR: %s", reason)


def is_error_response(response: EventFields) -> bool:
    """Return whether the response is an error, after converting its body to JSON for boto3."""
    is_error: bool = response["status_code"] >= FIRST_ERROR_STATUS
    if is_error and response["body"] and is_cbor(response["headers"].get("content-type")):
        try:
            response["body"] = convert_cbor_to_json(response["body"])
        except UnreadableBody:
            response["body"] = b""  # then only the status is known
    return is_error


def _retry_in_json(request: dict[str, Any], reason: str, code: str | None) -> int:
    request["body"] = convert_cbor_to_json(request["body"])
    request["headers"]["Content-Type"] = JSON_CONTENT_TYPE
    request["context"][_JSON_RETRY_KEY] = reason, code
    return 0


_WITHHELD_ROWS_KEY = "leasehold keeps the records"
_PLACEHOLDER = [{"Data": b"", "PartitionKey": "-"}]


class PutRows(list[Any]):
    """The rows of a PutRecords request. Their keys were checked, so boto3 need not validate them one by one."""


class ProducerCborHooks(CborHooks):
    """Chooses the format in which a producer's client sends `PutRows`. Other lists of records are left to boto3.

    Args:
        client: Any boto3 client. Handlers are registered with it.
        cbor: Whether to send records in CBOR.
    """

    def __init__(self, client: "KinesisClient", *, cbor: bool) -> None:
        super().__init__(client, cbor=cbor)
        withhold_rows = cast(
            "Callable[..., None]", self._withhold_rows
        )  # the stubs do not know that its return value matters
        client.meta.events.register("provide-client-params.kinesis.PutRecords", withhold_rows)

    def _handlers_by_operation(self) -> Handlers:
        return {
            "ListShards": (self._encode_request, self._convert_response),
            "PutRecords": (self._encode_rows, self._convert_response),
        }

    def _withhold_rows(self, params: EventFields, context: EventFields, **_event: object) -> EventFields | None:
        """Remove the rows from the parameters, so that boto3's serializer does not encode them."""
        rows = params.get("Records")
        if not self._use_cbor or "ListShards" not in self._confirmed_operations or not isinstance(rows, PutRows):
            return None
        if not rows or not all(isinstance(row["Data"], bytes) for row in rows):  # boto3 raises the right error
            return None
        context[_WITHHELD_ROWS_KEY] = rows
        return {**params, "Records": _PLACEHOLDER}

    def _encode_rows(self, params: EventFields, context: EventFields, **_event: object) -> None:
        if (rows := context.get(_WITHHELD_ROWS_KEY)) is not None:
            params["body"] = encode_cbor({**orjson.loads(params["body"]), "Records": rows})
            params["headers"]["Content-Type"] = CBOR_CONTENT_TYPE

    def _convert_response(
        self, response_dict: EventFields, customized_response_dict: EventFields, **_event: object
    ) -> None:
        """Convert the response, which is small, to JSON for boto3."""
        if is_error_response(response_dict) or not is_cbor(response_dict["headers"].get("content-type")):
            return
        try:
            response_dict["body"] = convert_cbor_to_json(response_dict["body"])
        except UnreadableBody as error:
            customized_response_dict[UNREADABLE_KEY], response_dict["body"] = str(error), b"{}"

    def _check_format(self, response: Any, request_dict: EventFields, operation: Any, **event: object) -> int | None:  # noqa: ANN401  boto3's own type
        if operation.name == "PutRecords" and response is not None:
            http_response, parsed_response = response
            if UNREADABLE_KEY in parsed_response:
                self._use_json_from_now_on(f"its response cannot be read: {parsed_response[UNREADABLE_KEY]}")
            if UNREADABLE_KEY in parsed_response or http_response.status_code >= SERVER_ERROR_STATUS:
                return None
        return super()._check_format(response, request_dict, operation, **event)


def replace_read_methods(client: "KinesisClient", hooks: CborHooks, arn: str | None = None) -> None:
    """Make this client send its requests for records directly instead of through boto3.

    If `arn` is given, requests contain the stream's ARN.
    """
    arn_parameter = {} if arn is None else {"StreamARN": arn}
    direct_calls, boto3_method = DirectCalls(client, ["GetRecords"]), client.get_records

    def get_records(**parameters: Any) -> Any:  # noqa: ANN401  as in boto3
        if not hooks.uses_cbor("GetRecords") or parameters.keys() != {"ShardIterator", "Limit"}:
            return boto3_method(**parameters)
        return direct_calls.call(
            "GetRecords",
            encode_cbor(parameters | arn_parameter),
            CBOR_CONTENT_TYPE,
            parse=parse_response,
            boto3_call=lambda: boto3_method(**parameters),
            repeatable=True,
        )

    _replace_methods(client, direct_calls, get_records=get_records)


def replace_put_methods(client: "KinesisClient", hooks: ProducerCborHooks, arn: str | None = None) -> None:
    """Make this client send `PutRows` directly. Records in any other form are still sent by boto3.

    If `arn` is given, requests contain the stream's ARN in addition to its name.
    """
    arn_parameter = {} if arn is None else {"StreamARN": arn}
    direct_calls, boto3_method = DirectCalls(client, ["PutRecords"]), client.put_records

    def put_records(**parameters: Any) -> Any:  # noqa: ANN401  as in boto3
        rows = parameters.get("Records")
        if not (
            isinstance(rows, PutRows)
            and rows
            and parameters.keys() == {"StreamName", "Records"}
            and hooks.uses_cbor("PutRecords")
            and all(type(row["Data"]) is bytes for row in rows)
        ):
            return boto3_method(**parameters)
        return direct_calls.call(
            "PutRecords",
            encode_cbor(parameters | arn_parameter),
            CBOR_CONTENT_TYPE,
            parse=_parse_put_response,
            boto3_call=lambda: boto3_method(**parameters),
            repeatable=False,
        )

    _replace_methods(client, direct_calls, put_records=put_records)


def _parse_put_response(body: bytes | bytearray) -> dict[str, Any] | None:
    """Parse the outcome of each record. Return None if boto3 must parse it."""
    try:
        response = parse_message(body, cbor=True)
    except UnreadableBody:
        return None
    rows = response.get("Records")
    # Each row must be a dictionary of strings. A response with a null value is left to boto3, which drops the value.
    if not isinstance(rows, list) or not all(
        type(row) is dict and {str}.issuperset(map(type, row.values())) for row in rows
    ):
        return None
    return response


def _replace_methods(client: Any, calls: DirectCalls, **methods: Any) -> None:  # noqa: ANN401  boto3 creates its classes at run time
    boto3_method = client.close

    def close() -> None:
        calls.close()
        boto3_method()

    for name, method in {**methods, "close": close}.items():
        setattr(client, name, method)
