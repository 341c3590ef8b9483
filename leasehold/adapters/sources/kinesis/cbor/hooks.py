"""The hooks into a client of boto3: what it asks is put into CBOR, and what it is answered taken apart.

Credentials, signing, endpoints, repetitions, proxies and errors stay boto3's. Only the records, nearly all of an
answer, are taken apart here, by compiled libraries; the rest of it is handed to boto3 as JSON, so that what it makes of
children, odd numbers and errors is its own. The events of a subscription come in place of boto3's own event stream,
which takes each record apart in Python. A producer's records go in CBOR past boto3's serializer, which would put them
into base64.

Rule 1: the content type of an answer says how it is read, whatever was asked.
Rule 2: a service that answers CBOR in JSON, refuses it, or writes what cannot be read, is spoken to in JSON from then
on, which is said once.
Rule 3: a refusal is one only from a service that has never answered in CBOR, and for which the same question in JSON
has another end; the question is asked again at once.
Rule 4: a service proves by its listing of shards, which does no harm, that it speaks CBOR; until then a producer's
records go in JSON.
Rule 5: a producer's records are repeated in JSON only where they were refused whole; what may have been written is not.

`read_directly` and `put_directly`: the calls that move records, past boto3 where its service speaks CBOR
(`stores/aws_calls`). The client is changed: its callers need not know.
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

from leasehold.adapters.sources.kinesis.faults import CREDENTIALS, DENIED, PASSING, SERVER_ERROR, THROTTLED
from leasehold.adapters.sources.kinesis.records import RowViews
from leasehold.stores.aws_calls.calls import DirectCalls
from leasehold.stores.deadlines import bounded_response
from leasehold.stores.printable import escaped, said

SCAN: Any = None
"""Takes answers apart without an object for each record; None: there is nothing quicker than cbor2."""
with suppress(ImportError):  # where it is not compiled
    from leasehold.adapters.sources.kinesis.cbor import scan as SCAN  # noqa: N812  a module that may be none

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient

log = escaped(logging.getLogger("leasehold.kinesis"))


CBOR = "application/x-amz-cbor-1.1"

Row = dict[str, Any]
"""A record as the service sends it, but with its data as bytes. Its time is a number: see `seconds_of`."""

AnswerRows = RowViews | list[Row]


_PLAIN = {"NextShardIterator": str, "MillisBehindLatest": int}
_KNOWN = {*_PLAIN, "ChildShards"}


_UNDEFINED = b"\xf7"


class Unreadable(Exception):
    """Not what Kinesis writes in this form."""


def is_cbor(content_type: object) -> bool:
    """Whether this header says CBOR: events name the form without the version."""
    return isinstance(content_type, str) and "cbor" in content_type


def packed(value: object) -> bytes:
    """A value as CBOR."""
    return cbor2.dumps(value)


def as_cbor(body: bytes | str) -> bytes:
    """A question in JSON, which boto3 wrote, as CBOR."""
    return packed(orjson.loads(body))


def as_json(body: bytes) -> bytes:
    """Write a body of CBOR as JSON. Raises Unreadable."""
    return _plain(told_of(body, cbor=True))


def answer_of(body: bytes, *, cbor: bool) -> tuple[AnswerRows, bytes]:
    """The rows of an answer, and the rest of it in JSON. Raises Unreadable for what boto3 may understand otherwise."""
    rows, answer = _apart(body, cbor=cbor)
    return rows, _plain(answer)


def plain_answer_of(body: bytes | bytearray) -> dict[str, Any] | None:
    """An answer in CBOR that says nothing but how reading goes on, without what is null; None: boto3 is to read it."""
    try:
        rows, answer = _apart(body, cbor=True)
    except Unreadable:
        return None
    # As boto3 we leave out what we have no name for: a field that a service adds must not cost a second reading.
    told = {name: value for name, value in answer.items() if value is not None and name in _KNOWN}
    plain = all(type(value) is _PLAIN.get(name) for name, value in told.items())
    return {**told, "Records": rows} if plain else None


def event_of(payload: bytes, *, cbor: bool) -> dict[str, Any]:
    """An event of a subscription, its rows as those of an answer, without what is null. Raises Unreadable."""
    rows, event = _apart(payload, cbor=cbor)
    return {"Records": rows, **{name: value for name, value in event.items() if value is not None}}


def told_of(payload: bytes | bytearray, *, cbor: bool) -> dict[str, Any]:
    """Parse a message. Raises Unreadable."""
    told = _loaded(payload, cbor=cbor)
    if not isinstance(told, dict):
        raise Unreadable("it says nothing by name")
    return told


def _apart(body: bytes | bytearray, *, cbor: bool) -> tuple[AnswerRows, Any]:
    """The rows, their data as bytes, and the rest by name."""
    if cbor and SCAN is not None and (found := SCAN.viewed(body)) is not None:
        *views, sealed, begin, end = found
        answer = _loaded(body[:begin] + _UNDEFINED + body[end:], cbor=True)
        if answer.pop("Records") is cbor2.undefined:  # else there is another list of this name
            return RowViews(body, cast("Any", views), SCAN.columns, sealed=sealed), answer
    answer = _loaded(body, cbor=cbor)
    rows: list[Row] | None = answer.pop("Records", None) if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise Unreadable("no answer with records")
    try:
        for row in rows:
            if type(row["Data"]) is bytes:
                continue
            try:  # in JSON, and by some local services, it is in base64
                row["Data"] = pybase64.b64decode(row["Data"], validate=True)
            except ValueError:  # boto3 passes over what is not of the alphabet
                row["Data"] = base64.b64decode(row["Data"])
    except (KeyError, TypeError, ValueError) as odd:
        raise Unreadable(f"no record: {said(odd)}") from odd
    return rows, answer


def _loaded(body: bytes | bytearray, *, cbor: bool) -> Any:  # noqa: ANN401  whatever the service wrote
    try:
        if not cbor:
            return orjson.loads(body)
        # Times are milliseconds, tagged or not; what the tag means by itself would be seconds.
        return cbor2.loads(body, semantic_decoders={1: lambda value, _immutable: value})
    except (cbor2.CBORDecodeError, ValueError) as odd:
        raise Unreadable(f"no {'CBOR' if cbor else 'JSON'}: {odd}") from odd


def _plain(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=_text)
    except TypeError as odd:
        raise Unreadable(f"nothing that JSON can say: {odd}") from odd


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return pybase64.b64encode_as_string(value)
    raise TypeError(type(value).__name__)


_MESSAGE_BYTES = 25 << 20  # at most; the service's own limits are lower
_PRELUDE_BYTES = 12  # how long the message is, how long its headers are, and their checksum


class Subscription:
    """The events of a subscription, as boto3 gives them.

    raw         the body of the answer, which is read as it comes
    unreadable  told why, where an event in CBOR cannot be read
    Raises ResponseParserError, as boto3 does, if it does not begin as a subscription begins.
    """

    def __init__(self, raw: Any, unreadable: Callable[[str], None]) -> None:  # noqa: ANN401  boto3 says no more of it
        self._raw_stream, self._unreadable = raw, unreadable
        self._messages = _messages(raw)
        first = next(self._messages, None)
        if first is None or _headers(first).get(":event-type") != "initial-response":
            raise ResponseParserError("First event was not of type initial-response")
        self.cbor = is_cbor(_headers(first).get(":content-type"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for message in self._messages:
            if _headers(message).get(":message-type") != "event":
                raise EventStreamError(_fault(message), "SubscribeToShard")
            if (name := _headers(message).get(":event-type")) == "SubscribeToShardEvent":
                yield {name: self._event(message)}

    def close(self) -> None:
        """Close the connection."""
        self._raw_stream.close()

    def _event(self, message: EventStreamMessage) -> dict[str, Any]:
        cbor = is_cbor(_headers(message).get(":content-type"))
        try:
            return event_of(message.payload, cbor=cbor)
        except Unreadable as odd:
            if cbor:
                self._unreadable(f"an event cannot be read: {odd}")
            raise ResponseParserError(f"an event cannot be read: {odd}") from odd


class Beginning:
    """A body that boto3 takes for a subscription in JSON of which nothing but the beginning has come."""

    def stream(self) -> list[bytes]:
        """All of it."""
        return [_INITIAL]

    def close(self) -> None:
        """Nothing is open."""


def _headers(message: EventStreamMessage) -> dict[str, Any]:
    headers: Any = message.headers  # the stubs have them for a number
    return dict(headers)


def _messages(raw: Any) -> Iterator[EventStreamMessage]:  # noqa: ANN401  as above
    """Each message once it is there; boto3's buffer checks it, but would copy all that has come with each chunk."""
    buffer, come, whole = EventStreamBuffer(), io.BytesIO(), _PRELUDE_BYTES
    if (deadline := bounded_response(raw)) is not None:
        deadline.restart()
    for chunk in raw.stream():
        come.write(chunk)
        if come.tell() < whole:
            continue
        data, begin = come.getvalue(), 0
        while (whole := _size(data, begin)) <= len(data) - begin:
            buffer.add_data(data[begin : begin + whole])
            try:
                messages = list(buffer)
            except (ArithmeticError, LookupError, StructError, TypeError, ValueError) as odd:
                # The buffer has no error of its own for headers that are none.
                raise ResponseParserError(f"an event has headers that cannot be read: {said(odd)}") from odd
            yield from messages
            begin += whole
        come = io.BytesIO()
        come.write(data[begin:])
        if deadline is not None:  # each event has one of its own, counted while we read
            deadline.restart()


def _size(data: bytes, begin: int) -> int:
    """The length of the message that begins here; of one with a damaged beginning, the length of that."""
    prelude = data[begin : begin + _PRELUDE_BYTES]
    if len(prelude) < _PRELUDE_BYTES or crc32(prelude[:8]) != int.from_bytes(prelude[8:]):
        return _PRELUDE_BYTES
    size = int.from_bytes(prelude[:4])
    # Any other is damaged, too: of none nothing would ever be read, and of a huge one all that comes be kept.
    return size if _PRELUDE_BYTES < size <= _MESSAGE_BYTES else _PRELUDE_BYTES


def _fault(message: EventStreamMessage) -> Any:  # noqa: ANN401  as a service's error
    headers = _headers(message)
    if (code := headers.get(":exception-type")) is None:
        return {"Error": {"Code": headers.get(":error-code", ""), "Message": headers.get(":error-message", "")}}
    try:
        told = told_of(message.payload, cbor=is_cbor(headers.get(":content-type")))
    except Unreadable:
        told = {}
    return {"Error": {"Code": code, "Message": told.get("message", told.get("Message", ""))}}


_INITIAL_HEADERS = b"".join(
    pack(">B", len(name)) + name + pack(">BH", 7, len(text)) + text
    for name, text in ((b":message-type", b"event"), (b":event-type", b"initial-response"))
)
_INITIAL_PRELUDE = pack(">II", len(_INITIAL_HEADERS) + 2 + 16, len(_INITIAL_HEADERS))
_INITIAL = _INITIAL_PRELUDE + pack(">I", crc32(_INITIAL_PRELUDE)) + _INITIAL_HEADERS + b"{}"
_INITIAL += pack(">I", crc32(_INITIAL))

JSON = "application/x-amz-json-1.1"
REFUSED = 300  # and all above
_UNDERSTOOD = THROTTLED | PASSING | CREDENTIALS | DENIED | {"ResourceNotFoundException", "ExpiredIteratorException"}
"""Errors that say that the question was understood."""

Told = dict[str, Any]
"""The part of an event of boto3's that its handlers may change."""

Handlers = dict[str, tuple[Callable[..., None], Callable[..., None]]]

UNREAD, _REPEATED = "Unread", "leasehold repeats in JSON"


class Wire:
    """How one client and its service speak about records.

    client  any of boto3's; it is changed
    cbor    whether to ask in CBOR
    """

    def __init__(self, client: "KinesisClient", *, cbor: bool) -> None:
        self._asks_cbor = cbor
        self._proved: set[str] = set()  # what was answered in CBOR
        self._lock = Lock()
        events = client.meta.events
        judge = cast("Callable[..., None]", self._judge)  # the stubs do not know that its answer counts
        for operation, (ask, read) in self._handlers().items():
            events.register(f"before-call.kinesis.{operation}", ask)
            events.register(f"before-parse.kinesis.{operation}", read)
            # Before boto3's own handler, which would wait before it repeats.
            events.register_first(f"needs-retry.kinesis.{operation}", judge)

    def speaks_cbor(self, operation: str) -> bool:
        """Whether questions of this kind are asked in CBOR, and have been answered in it."""
        return self._asks_cbor and operation in self._proved

    def _handlers(self) -> Handlers:
        """The form of each request and the reader of its answer."""
        return {"GetRecords": (self._ask, self._read), "SubscribeToShard": (self._ask, self._receive)}

    def _ask(self, params: Told, **_event: object) -> None:
        # A time is asked for in JSON: how it is to be told in CBOR, no local service could show.
        if self._asks_cbor and b"Timestamp" not in params["body"]:
            params["body"] = as_cbor(params["body"])
            params["headers"]["Content-Type"] = CBOR

    def _read(self, response_dict: Told, customized_response_dict: Told, **_event: object) -> None:
        if refused(response_dict):
            return
        told, body = response_dict["headers"].get("content-type"), response_dict["body"]
        try:
            rows, response_dict["body"] = answer_of(body, cbor=is_cbor(told))
        except Unreadable as odd:
            if is_cbor(told):  # in JSON boto3 may make something of it
                customized_response_dict[UNREAD], response_dict["body"] = str(odd), b"{}"
            return
        customized_response_dict["Records"] = rows

    def _receive(self, response_dict: Told, customized_response_dict: Told, **_event: object) -> None:
        if not refused(response_dict):
            customized_response_dict["EventStream"] = Subscription(response_dict["body"], self._fall_back)
            response_dict["body"] = Beginning()

    def _judge(self, response: Any, request_dict: Told, operation: Any, **_event: object) -> int | None:  # noqa: ANN401  of boto3
        """Zero, the seconds to wait, where the question is to be asked again in JSON; None leaves it to boto3."""
        if response is None:
            return None
        http, parsed = response
        code = parsed.get("Error", {}).get("Code")
        if not is_cbor(request_dict["headers"]["Content-Type"]):
            why, first = request_dict["context"].pop(_REPEATED, ("", code))
            if code != first and http.status_code < SERVER_ERROR:
                self._fall_back(why)
        elif UNREAD in parsed:
            return _repeated(request_dict, f"its answer cannot be read: {parsed[UNREAD]}", UNREAD)
        elif is_cbor(http.headers.get("content-type")) or getattr(parsed.get("EventStream"), "cbor", False):
            self._proved.add(operation.name)
        elif http.status_code < REFUSED:
            self._fall_back("it answers in JSON")
        elif operation.name not in self._proved and code not in _UNDERSTOOD:
            return _repeated(request_dict, f"it was refused: {http.status_code} {code}", code)
        return None

    def _fall_back(self, why: str) -> None:
        with self._lock:
            said, self._asks_cbor = not self._asks_cbor, False
        if not said:
            log.warning("Kinesis was asked in CBOR, and is asked in JSON from now on: %s", why)


def refused(response: Told) -> bool:
    """Whether this is a refusal, which boto3 is given in JSON."""
    is_one: bool = response["status_code"] >= REFUSED
    if is_one and response["body"] and is_cbor(response["headers"].get("content-type")):
        try:
            response["body"] = as_json(response["body"])
        except Unreadable:
            response["body"] = b""  # then the status is all that is known
    return is_one


def _repeated(request: dict[str, Any], why: str, code: str | None) -> int:
    request["body"] = as_json(request["body"])
    request["headers"]["Content-Type"] = JSON
    request["context"][_REPEATED] = why, code
    return 0


_KEPT = "leasehold keeps the records"
_STAND_IN = [{"Data": b"", "PartitionKey": "-"}]


class PutRows(list[Any]):
    """The rows of a PutRecords whose keys were checked: boto3 need not look at them one by one."""


class PutWire(Wire):
    """How a producer's client and its service speak about its records; other lists of records are left to boto3.

    client  any of boto3's; it is changed
    cbor    whether to speak in CBOR
    """

    def __init__(self, client: "KinesisClient", *, cbor: bool) -> None:
        super().__init__(client, cbor=cbor)
        keep = cast("Callable[..., None]", self._keep)  # the stubs do not know that its answer counts
        client.meta.events.register("provide-client-params.kinesis.PutRecords", keep)

    def _handlers(self) -> Handlers:
        return {"ListShards": (self._ask, self._rewrite), "PutRecords": (self._put, self._rewrite)}

    def _keep(self, params: Told, context: Told, **_event: object) -> Told | None:
        """Withhold rows from boto3's serializer; what else is asked is its own."""
        rows = params.get("Records")
        if not self._asks_cbor or "ListShards" not in self._proved or not isinstance(rows, PutRows):
            return None
        if not rows or not all(isinstance(row["Data"], bytes) for row in rows):  # boto3 says what is wrong with it
            return None
        context[_KEPT] = rows
        return {**params, "Records": _STAND_IN}

    def _put(self, params: Told, context: Told, **_event: object) -> None:
        if (rows := context.get(_KEPT)) is not None:
            params["body"] = packed({**orjson.loads(params["body"]), "Records": rows})
            params["headers"]["Content-Type"] = CBOR

    def _rewrite(self, response_dict: Told, customized_response_dict: Told, **_event: object) -> None:
        """Give boto3 the answer in JSON: there is little of it."""
        if refused(response_dict) or not is_cbor(response_dict["headers"].get("content-type")):
            return
        try:
            response_dict["body"] = as_json(response_dict["body"])
        except Unreadable as odd:
            customized_response_dict[UNREAD], response_dict["body"] = str(odd), b"{}"

    def _judge(self, response: Any, request_dict: Told, operation: Any, **event: object) -> int | None:  # noqa: ANN401  of boto3
        if operation.name == "PutRecords" and response is not None:
            http, parsed = response
            if UNREAD in parsed:
                self._fall_back(f"its answer cannot be read: {parsed[UNREAD]}")
            if UNREAD in parsed or http.status_code >= SERVER_ERROR:
                return None
        return super()._judge(response, request_dict, operation, **event)


def read_directly(client: "KinesisClient", wire: Wire, arn: str | None = None) -> None:
    """Have this client ask for records directly, naming the stream by its ARN if one is given."""
    named = {} if arn is None else {"StreamARN": arn}
    calls, by_boto = DirectCalls(client, ["GetRecords"]), client.get_records

    def get_records(**question: Any) -> Any:  # noqa: ANN401  as boto3
        if not wire.speaks_cbor("GetRecords") or question.keys() != {"ShardIterator", "Limit"}:
            return by_boto(**question)
        return calls.call(
            "GetRecords",
            packed(question | named),
            CBOR,
            read=plain_answer_of,
            by_boto=lambda: by_boto(**question),
            again=True,
        )

    _change(client, calls, get_records=get_records)


def put_directly(client: "KinesisClient", wire: PutWire, arn: str | None = None) -> None:
    """Have this client send a producer's records directly; other lists of records are left to boto3.

    With an `arn`, requests name the stream by it, too.
    """
    named = {} if arn is None else {"StreamARN": arn}
    calls, by_boto = DirectCalls(client, ["PutRecords"]), client.put_records

    def put_records(**question: Any) -> Any:  # noqa: ANN401  as boto3
        rows = question.get("Records")
        if not (
            isinstance(rows, PutRows)
            and rows
            and question.keys() == {"StreamName", "Records"}
            and wire.speaks_cbor("PutRecords")
            and all(type(row["Data"]) is bytes for row in rows)
        ):
            return by_boto(**question)
        return calls.call(
            "PutRecords",
            packed(question | named),
            CBOR,
            read=_results,
            by_boto=lambda: by_boto(**question),
            again=False,
        )

    _change(client, calls, put_records=put_records)


def _results(body: bytes | bytearray) -> dict[str, Any] | None:
    """The outcome of each record; None: boto3 is to read it."""
    try:
        told = told_of(body, cbor=True)
    except Unreadable:
        return None
    rows = told.get("Records")
    # Each is a dictionary of texts; a null among them is boto3's to leave out.
    if not isinstance(rows, list) or not all(
        type(row) is dict and {str}.issuperset(map(type, row.values())) for row in rows
    ):
        return None
    return told


def _change(client: Any, calls: DirectCalls, **methods: Any) -> None:  # noqa: ANN401  boto3 makes its classes as it runs
    by_boto = client.close

    def close() -> None:
        calls.close()
        by_boto()

    for name, method in {**methods, "close": close}.items():
        setattr(client, name, method)
