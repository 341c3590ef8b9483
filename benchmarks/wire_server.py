"""Local servers in place of Kinesis and DynamoDB, which return prepared responses immediately."""

import base64
import json
import os
from binascii import crc32
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from struct import pack
from typing import Any

import cbor2
from attrs import frozen

from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.balancer.model import HASH_KEYS

CBOR, JSON = "application/x-amz-cbor-1.1", "application/x-amz-json-1.1"
ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/canned"
FIRST = 4968046425822881449865849459610243885922197413469
"""The first digits of the sequence numbers in a response.

The number is one digit shorter than in Kinesis, whose numbers contain the number of the shard. All shards of this
server have the same records, and a worker rejects records whose number belongs to another shard.
"""
NEXT = "n" * 200  # about as long as a real iterator


@frozen
class Load:
    """The contents of a response.

    Attributes:
        records: The number of Kinesis records, of `size` bytes each.
        users: The number of user records of 100 bytes in each, or 0 if they are not aggregates.
    """

    name: str
    records: int
    size: int
    users: int = 0

    @property
    def rows(self) -> int:
        """The number of user records in a response."""
        return self.records * (self.users or 1)


def rows_of(load: Load) -> list[dict[str, Any]]:
    """Return the records of a response, with values as in CBOR."""
    data = b""
    if load.users:
        aggregate = Aggregate(load.size)
        for number in range(load.users):
            assert aggregate.add(b"%010d" % number * 10, f"key-{number % 100}"), "they do not fit"
        data = aggregate.encode()
    return [
        {
            "ApproximateArrivalTimestamp": 1_795_363_072_573 + number,
            "Data": data or os.urandom(load.size),
            "EncryptionType": "NONE",
            "PartitionKey": f"key-{number % 1000}",
            "SequenceNumber": f"{FIRST * 10**6 + number}",
        }
        for number in range(load.records)
    ]


def encodings_of(response: dict[str, Any]) -> dict[str, bytes]:
    """Return the response encoded as CBOR and as JSON."""
    rows = [
        {
            **row,
            "Data": base64.b64encode(row["Data"]).decode(),
            "ApproximateArrivalTimestamp": row["ApproximateArrivalTimestamp"] / 1000,
        }
        for row in response["Records"]
    ]
    return {CBOR: cbor2.dumps(response), JSON: json.dumps({**response, "Records": rows}).encode()}


def frame(event: str, content_type: str, payload: bytes) -> bytes:
    """Return an encoded message of an event stream."""
    fields = {":message-type": "event", ":event-type": event, ":content-type": content_type}
    headers = b"".join(
        pack(">B", len(name)) + name.encode() + pack(">BH", 7, len(value)) + value.encode()
        for name, value in fields.items()
    )
    prelude = pack(">II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + pack(">I", crc32(prelude)) + headers + payload
    return message + pack(">I", crc32(message))


class Handler(BaseHTTPRequestHandler):
    """A connection to the Kinesis server."""

    protocol_version = "HTTP/1.1"
    answers: dict[str, bytes]
    events: dict[str, bytes]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """One question."""
        form = CBOR if "cbor" in self.headers["Content-Type"] else JSON
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        if operation == "GetRecords":
            self._write(form, self._records(form))
        elif operation == "SubscribeToShard":
            self._stream_events(form)
        else:
            response = self._respond(operation, (cbor2.loads if form == CBOR else json.loads)(body))
            self._write(form, cbor2.dumps(response) if form == CBOR else json.dumps(response).encode())

    def _records(self, form: str) -> bytes:
        return self.answers[form]

    def _respond(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        first_key, last_key = map(str, HASH_KEYS)
        if operation == "PutRecords":
            rows = [{"ShardId": "shardId-0", "SequenceNumber": "4968"}] * len(request["Records"])
            return {"FailedRecordCount": 0, "Records": rows}
        consumer = {"ConsumerName": "c", "ConsumerARN": ARN + "/consumer/c:1", "ConsumerStatus": "ACTIVE"}
        shard = {
            "ShardId": "shardId-0",
            "HashKeyRange": {"StartingHashKey": first_key, "EndingHashKey": last_key},
            "SequenceNumberRange": {"StartingSequenceNumber": "1"},
        }
        responses: dict[str, dict[str, Any]] = {
            "GetShardIterator": {"ShardIterator": NEXT},
            "ListShards": {"Shards": [shard]},
            "DescribeStreamSummary": {"StreamDescriptionSummary": {"StreamARN": ARN}},
            "DescribeStreamConsumer": {"ConsumerDescription": {**consumer, "StreamARN": ARN}},
        }
        return responses[operation]

    def _write(self, form: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", form)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream_events(self, form: str) -> None:
        """Send events until the client closes the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        content_type = "application/cbor" if form == CBOR else "application/json"
        message = frame("initial-response", content_type, b"\xa0" if form == CBOR else b"{}")
        event = frame("SubscribeToShardEvent", content_type, self.events[form])
        try:
            while True:
                for begin in range(0, len(message), 1 << 16):
                    part = message[begin : begin + (1 << 16)]
                    self.wfile.write(b"%x\r\n" % len(part) + part + b"\r\n")
                message = event
        except OSError:
            self.close_connection = True


def serve(load: Load, ports: Any) -> None:  # noqa: ANN401  a queue
    """Serve a Kinesis stream until the process is terminated."""
    response: dict[str, Any] = {"Records": rows_of(load), "MillisBehindLatest": 60_000}
    Handler.answers = encodings_of({**response, "NextShardIterator": NEXT, "ChildShards": None})
    Handler.events = encodings_of({**response, "ContinuationSequenceNumber": response["Records"][-1]["SequenceNumber"]})
    _run_http_server(Handler, ports)


def _run_http_server(handler: type[BaseHTTPRequestHandler], ports: Any) -> None:  # noqa: ANN401  a queue
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    ports.put(server.server_port)
    server.serve_forever()


def served(load: Load) -> AbstractContextManager[str]:
    """Serve a stream in a separate process until the block ends, and yield its URL."""
    return _run_server(serve, load)


@contextmanager
def _run_server(target: Callable[..., None], argument: object) -> Iterator[str]:
    spawn = get_context("spawn")
    ports = spawn.Queue()
    process = spawn.Process(target=target, args=(argument, ports), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=60)}"
    finally:
        process.terminate()
        process.join()


class TableHandler(BaseHTTPRequestHandler):
    """A connection to the DynamoDB server."""

    protocol_version = "HTTP/1.1"
    answers: dict[str, bytes]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """One question."""
        self.rfile.read(int(self.headers["Content-Length"]))
        body = self.answers[self.headers["X-Amz-Target"].rpartition(".")[2]]
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-amz-crc32", str(crc32(body)))
        self.end_headers()
        self.wfile.write(body)


def serve_table(answers: dict[str, bytes], ports: Any) -> None:  # noqa: ANN401  a queue
    """Serve a DynamoDB table until the process is terminated."""
    TableHandler.answers = answers
    _run_http_server(TableHandler, ports)


def served_by(answers: dict[str, bytes]) -> AbstractContextManager[str]:
    """Serve a table in a separate process until the block ends, and yield its URL."""
    return _run_server(serve_table, answers)
