"""A stand-in for DynamoDB Streams that runs in this process and has the service's limits.

The stand-in serves only streams. Tests put items by calling `put`, and lease tables need another stand-in. DynamoDB
Local has streams too, but its shards never end. Here, a shard ends when a test calls `end_open_shards`, or at regular
intervals, and another shard follows it. Ended shards are removed after the retention. The stand-in imitates these
limits of the service:

- A page has at most 100 shards, and a response has at most 1,000 records or 1 MB.
- Iterators expire.
- Reads before the trim horizon are rejected.
- There may be an empty response between two records.
- A page of shards may still show an ended shard as open.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from attrs import Factory, define, field

from leasehold.adapters.threads import spawn
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.local"))

PAGE, RECORDS, BYTES = 100, 1000, 1_000_000
FIRST_NUMBER = 10**20
REGION, ACCOUNT = "eu-west-1", "123456789012"

TypedItem = dict[str, dict[str, Any]]


class TableRejection(Exception):
    """An error response of the service. The arguments are the name of the error and its message."""


@define
class TableShard:
    """A shard. `ended` is the time when it ended, and `trimmed` the number of its records that were removed."""

    id: str
    parent: str | None
    first: int
    rows: list[dict[str, Any]] = field(factory=list)
    last: int | None = None
    ended: float = math.inf
    trimmed: int = 0

    def build_listing_entry(self, *, stale: bool) -> dict[str, Any]:
        """Return the shard's entry in a listing. A stale entry does not show that the shard has ended."""
        sequence_number_range = {"StartingSequenceNumber": str(self.first)}
        if self.last is not None and not stale:
            sequence_number_range["EndingSequenceNumber"] = str(self.last)
        return {"ShardId": self.id, "SequenceNumberRange": sequence_number_range} | (
            {"ParentShardId": self.parent} if self.parent else {}
        )


@define
class TableStreams:
    """A table and its streams. Only the latest stream is enabled, but the earlier ones can still be read.

    Attributes:
        name: The name of the table.
        open_shard_count: The number of open shards.
        roll_seconds: The lifetime of a shard. If infinite, shards end only when a test calls `end_open_shards`.
        retention: The number of seconds for which a shard is kept after its end.
        stale_seconds: How long listings still show an ended shard as open, together with its child.
        iterator_seconds: How long an iterator is valid.
        empty_every: If this is not 0, every response to GetRecords whose number is a multiple of it is empty.
        limit: The maximum number of GetRecords requests per second for a shard, or 0 for no limit.
        clock: Returns the time in seconds since 1970.
        refuse: The names of the errors with which the next requests are rejected.
        denied: The operations for which the caller is not authorized.
        asked: The number of requests by operation.
        kept: If not None, the sequence numbers of all changes are added to this set.
        shards: The shards of the current stream by id.
        status: The status of the stream, or "" if the table never had a stream.
        made: The time when the current stream was created.
    """

    name: str = "orders"
    open_shard_count: int = 2
    roll_seconds: float = math.inf
    retention: float = 86_400.0
    stale_seconds: float = 0.0
    iterator_seconds: float = 900.0
    empty_every: int = 0
    limit: int = 0
    clock: Callable[[], float] = time.time
    refuse: list[str] = field(factory=list)
    denied: set[str] = field(factory=set)
    asked: Counter[str] = field(factory=Counter)
    kept: set[int] | None = None
    shards: dict[str, TableShard] = field(factory=dict)
    status: str = "ENABLED"
    made: float = 0.0
    _former: dict[str, tuple[float, dict[str, TableShard]]] = field(factory=dict)
    _open: list[str] = field(factory=list)
    _number: int = FIRST_NUMBER
    _items: dict[str, TypedItem] = field(factory=dict)
    _recent_requests: dict[str, list[float]] = field(factory=dict)
    _last_roll: float = 0.0
    _lock: Any = Factory(Lock)

    def __attrs_post_init__(self) -> None:
        self.enable_stream()

    @property
    def arn(self) -> str:
        """The ARN of the table's current stream."""
        stream_label = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.made)) + f".{int(self.made * 1000) % 1000:03}"
        )
        return f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/{self.name}/stream/{stream_label}"

    def enable_stream(self) -> None:
        """Create a new stream, which does not contain the records of the previous one."""
        if self.shards:
            self._former[self.arn] = (self.made, self.shards)
        self.made, self._last_roll, self.status = self.clock(), self.clock(), "ENABLED"
        self.shards, self._open = {}, []
        for _ in range(self.open_shard_count):
            self._open.append(self._create_shard(None))

    def disable_stream(self) -> None:
        """Disable the stream. Its shards end without children."""
        with self._lock:
            for shard in self._open:
                self._end_shard(shard)
            self._open, self.status = [], "DISABLED"

    def put(self, key: str, item: TypedItem | None) -> None:
        """Write the item with this key, or delete it if `item` is None."""
        with self._lock:
            self._advance()
            former_item = self._items.pop(key, None)
            if item is not None:
                self._items[key] = {"id": {"S": key}, **item}
            self._number += 7
            if self.kept is not None:
                self.kept.add(self._number)
            change: dict[str, Any] = {
                "ApproximateCreationDateTime": int(self.clock()),
                "Keys": {"id": {"S": key}},
                "SequenceNumber": str(self._number),
                "SizeBytes": 40,
                "StreamViewType": "NEW_AND_OLD_IMAGES",
            }
            change |= {"NewImage": self._items[key]} if item is not None else {}
            change |= {"OldImage": former_item} if former_item is not None else {}
            event_name = "REMOVE" if item is None else "MODIFY" if former_item is not None else "INSERT"
            row = {"eventID": str(self._number), "eventName": event_name, "eventVersion": "1.1", "dynamodb": change}
            row |= {"eventSource": "aws:dynamodb", "awsRegion": REGION}
            # `hash` cannot be used, because the hash of a string differs between processes.
            self.shards[self._open[sum(key.encode()) % self.open_shard_count]].rows.append(row)

    def end_open_shards(self) -> None:
        """End every open shard, and open a child of each."""
        with self._lock:
            self._end_open_shards()

    def remove_shards(self, *shards: str) -> None:
        """Remove these ended shards, as the service does after a day."""
        for shard in shards:
            del self.shards[shard]

    def _advance(self) -> None:
        if self.clock() >= self._last_roll + self.roll_seconds:
            self._end_open_shards()
        for expired_shard in [
            old_shard for old_shard in self.shards.values() if self.clock() > old_shard.ended + self.retention
        ]:
            del self.shards[expired_shard.id]

    def _end_open_shards(self) -> None:
        self._last_roll = self.clock()
        for lane, shard in enumerate(self._open):
            self._end_shard(shard)
            self._open[lane] = self._create_shard(shard)

    def _end_shard(self, shard: str) -> None:
        ending_shard = self.shards[shard]
        ending_shard.last, ending_shard.ended = self._number, self.clock()

    def _create_shard(self, parent: str | None) -> str:
        self._number += 1
        shard = f"shardId-{int(self.clock() * 1000):020}-{len(self.shards):04x}{self._number % 65536:04x}"
        self.shards[shard] = TableShard(shard, parent, self._number)
        return shard

    def answer_request(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request. Raises TableRejection if the request is rejected."""
        with self._lock:
            self.asked[operation] += 1
            self._advance()
            if operation in self.denied:
                raise TableRejection("AccessDeniedException", f"not authorized to perform dynamodb:{operation}")
            if self.refuse:
                raise TableRejection(self.refuse.pop(0), "as the test wants it")
            match operation:
                case "DescribeTable":
                    if request["TableName"] != self.name:
                        raise TableRejection(
                            "ResourceNotFoundException", "Requested resource not found: Table not found"
                        )
                    stream_fields = {"LatestStreamArn": self.arn} if self.status else {}
                    return {"Table": {"TableName": self.name, "TableStatus": "ACTIVE", **stream_fields}}
                case "DescribeStream":
                    return self._describe_stream(request)
                case "GetShardIterator":
                    return self._get_iterator(request)
                case "GetRecords":
                    return self._get_records(request)
        raise TableRejection("UnknownOperationException", operation)

    def _find_shards_of_stream(self, arn: str) -> dict[str, TableShard]:
        if arn == self.arn:
            return self.shards
        if arn in self._former:
            return self._former[arn][1]
        raise TableRejection("ResourceNotFoundException", f"Requested resource not found: Stream: {arn} not found")

    def _describe_stream(self, request: dict[str, Any]) -> dict[str, Any]:
        arn = request["StreamArn"]
        shards = sorted(self._find_shards_of_stream(arn).values(), key=lambda listed_shard: listed_shard.first)
        if (shard_filter := request.get("ShardFilter")) is not None:
            shards = [shard for shard in shards if shard.parent == shard_filter["ShardId"]]
        last_known_shard = request.get("ExclusiveStartShardId")
        first_index = 0 if last_known_shard is None else 1 + [shard.id for shard in shards].index(last_known_shard)
        page = shards[first_index : first_index + min(request.get("Limit", PAGE), PAGE)]
        stale_time = self.clock() - self.stale_seconds
        description: dict[str, Any] = {
            "StreamArn": arn,
            "StreamLabel": arn.rpartition("/")[2],
            "StreamStatus": self.status if arn == self.arn else "DISABLED",
            "StreamViewType": "NEW_AND_OLD_IMAGES",
            "TableName": self.name,
            "CreationRequestDateTime": self.made if arn == self.arn else self._former[arn][0],
            "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
            "Shards": [shard.build_listing_entry(stale=shard.ended > stale_time) for shard in page],
        }
        has_more = first_index + len(page) < len(shards)
        return {"StreamDescription": description | ({"LastEvaluatedShardId": page[-1].id} if has_more else {})}

    def _get_iterator(self, request: dict[str, Any]) -> dict[str, Any]:
        shard = self._find_shards_of_stream(request["StreamArn"]).get(request["ShardId"])
        if shard is None:
            raise TableRejection("ResourceNotFoundException", "Requested resource not found: Shard does not exist")
        sequence_numbers = [int(row["dynamodb"]["SequenceNumber"]) for row in shard.rows]
        iterator_type = request["ShardIteratorType"]
        match iterator_type:
            case "TRIM_HORIZON":
                position = shard.trimmed
            case "LATEST":
                position = len(shard.rows)
            case "AT_SEQUENCE_NUMBER" | "AFTER_SEQUENCE_NUMBER":
                first_number = int(request["SequenceNumber"]) + (iterator_type == "AFTER_SEQUENCE_NUMBER")
                if shard.trimmed and first_number <= sequence_numbers[shard.trimmed - 1]:
                    raise TableRejection(
                        "TrimmedDataAccessException", "The data you are trying to access has been trimmed"
                    )
                position = sum(number < first_number for number in sequence_numbers)
            case "AT_TIMESTAMP":
                if request["Timestamp"] > self.clock():
                    raise TableRejection("ValidationException", "Timestamp is in the future")
                creation_times = [row["dynamodb"]["ApproximateCreationDateTime"] for row in shard.rows]
                position = sum(creation_time < request["Timestamp"] for creation_time in creation_times)
            case _:
                raise TableRejection("ValidationException", f"unknown ShardIteratorType {iterator_type}")
        return {"ShardIterator": f"{shard.id}|{position}|{self.clock()}"}

    def _get_records(self, request: dict[str, Any]) -> dict[str, Any]:
        name, start_text, issued_at = request["ShardIterator"].split("|")
        shards_by_stream = [shards for _, shards in self._former.values()] + [self.shards]
        shard, start, now = (
            next((stream_shards[name] for stream_shards in shards_by_stream if name in stream_shards), None),
            int(start_text),
            self.clock(),
        )
        if shard is None:
            raise TableRejection("ResourceNotFoundException", "Requested resource not found: Shard does not exist")
        if now > float(issued_at) + self.iterator_seconds:
            raise TableRejection("ExpiredIteratorException", "The provided iterator exceeds the maximum age allowed.")
        if start < shard.trimmed:
            raise TableRejection("TrimmedDataAccessException", "The data you are trying to access has been trimmed")
        recent_requests = self._recent_requests[name] = [
            request_time for request_time in self._recent_requests.get(name, []) if request_time > now - 1
        ]
        if self.limit and len(recent_requests) >= self.limit:
            raise TableRejection(
                "LimitExceededException", "more than 2 readers of one shard, or requests come too fast"
            )
        recent_requests.append(now)
        rows, size = list[dict[str, Any]](), 0
        if not self.empty_every or self.asked["GetRecords"] % self.empty_every:
            for row in shard.rows[start : start + min(request.get("Limit", RECORDS), RECORDS)]:
                size += len(json.dumps(row))
                if rows and size > BYTES:
                    break
                rows.append(row)
        end_index = start + len(rows)
        is_at_end = shard.last is not None and end_index == len(shard.rows) and (rows or start == end_index)
        response: dict[str, Any] = {"Records": rows}
        return response if is_at_end else response | {"NextShardIterator": f"{name}|{end_index}|{now}"}


@contextmanager
def run_table_server(table: TableStreams) -> Iterator[str]:
    """Serve the table's streams over HTTP, and yield the URL."""

    class TableRequest(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            status, response = 200, dict[str, Any]()
            try:
                response = table.answer_request(self.headers["X-Amz-Target"].rpartition(".")[2], request)
            except TableRejection as rejection:
                code, message = rejection.args
                status = 500 if code == "InternalServerError" else 400
                response = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message}
            body = json.dumps(response).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), TableRequest)
    server.daemon_threads = True
    server_thread = spawn(
        "table-streams",
        server.serve_forever,
        lambda fault: log.error("streams are no longer served: %s", error_summary(fault)),
    )
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        server_thread.join()
