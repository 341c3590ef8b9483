"""The stream of a DynamoDB table as a source: its shards, and a reader for each.

Most is as with Kinesis, by whose poller shards are read: iterators, their expiry, the pace, the growing time-outs, and
the end of a shard. These differ:

- The stream is named by its ARN. A table has another stream, with another ARN, each time that its stream is enabled.
- Shards have no hash ranges, one parent at most, end after some hours by themselves, and are gone after a day.
- A page of shards may be older than another one: a shard that has a child is closed, whatever its own entry says.
- An answer does not say how far behind it is. The time of its last record does, by the service's clock.
"""

import json
import logging
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, ClassVar

from boto3 import Session
from botocore.exceptions import ClientError, ParamValidationError, ReadTimeoutError

from leasehold.adapters.sources.call_patience import CallPatience, TimedClients
from leasehold.adapters.sources.kinesis.clients import patient_client
from leasehold.adapters.sources.kinesis.faults import (
    AwsService,
    PollPace,
    code_of,
    max_records_of,
    poll_seconds_of,
    said_plainly,
    understood,
)
from leasehold.adapters.sources.kinesis.poller import TRIMMED_TEXT, Poller
from leasehold.adapters.sources.kinesis.source import PolledStream
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.threads import seconds
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, Trimmed
from leasehold.stores.aws import session_of
from leasehold.stores.printable import escaped
from leasehold.stores.urls import date_of

if TYPE_CHECKING:  # the stubs are no dependency; of those that are at hand this service's questions are nearest
    from types_boto3_kinesis import KinesisClient

log = escaped(logging.getLogger("leasehold.dynamodb_streams"))

STREAMS = AwsService("DynamoDB Streams", "dynamodb")
PAGE = 100
DIGITS = 21, 40
"""The least and the most digits of a sequence number."""
EMPTY_AT_TIP = 3
"""So many empty answers in a row mean the tip of a shard: single ones also come between two records."""
BEHIND_SECONDS = 2.0
"""A last record that is older, in whole seconds, has others after it where records come all the time."""


class StreamsClients(TimedClients):
    """Boto3's clients of DynamoDB Streams."""

    late = ReadTimeoutError
    service = STREAMS.name


class TableClients(TimedClients):
    """Boto3's clients of DynamoDB."""

    late = ReadTimeoutError
    service = "DynamoDB"


class ChangePoller(Poller):
    """A reader of one shard of a table's stream.

    Where the start is a time that the service, or an older boto3, has no iterator for, the shard is read from its
    beginning, and what was changed before is left out.
    """

    most = 1000
    service = STREAMS
    names: ClassVar[Mapping[str, str]] = {**Poller.names, "Stream": "StreamArn", "SequenceNumber": "SequenceNumber"}

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        shard: str,
        start: Position,
        *,
        rewind: bool = False,
        pace: PollPace | None = None,
        patience: CallPatience | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(client, stream, shard, start, None, rewind=rewind, pace=pace, patience=patience, most=most)
        self._since = self._start.sub / 1000 if self._start.sequence == "AT_TIMESTAMP" else None
        self._empty = 0

    def _placed(self) -> str:
        least, most = DIGITS
        if self._read is None and self._start.numbered and not least <= len(self._start.sequence) <= most:
            self._trimmed(None)  # no record ever had this number, and boto3 would not ask for it
        try:
            return super()._placed()
        except (ClientError, ParamValidationError) as error:
            unknown = isinstance(error, ParamValidationError) or code_of(error) == "ValidationException"
            if not (unknown and self._place()["Type"] == "AT_TIMESTAMP"):
                raise
            self._start = TRIM_HORIZON
            placed = super()._placed()
            log.info("shard %s: there is no iterator at a time, reading it from its beginning", self._shard)
            return placed

    def _rewind_from(self, error: ClientError) -> None:
        if code_of(error) != "TrimmedDataAccessException":
            raise error
        self._trimmed(error)

    def _over(self, error: ClientError) -> bool:
        if code_of(error) == "TrimmedDataAccessException":
            self._trimmed(error)
            return True
        return super()._over(error)

    def _trimmed(self, error: ClientError | None) -> None:
        """Begin with the oldest record, if nothing was read before, or that is wanted. Raises Trimmed."""
        at = self._read or (self._start.sequence if self._start.numbered else None)
        if at is not None and not self._rewind:
            raise Trimmed(TRIMMED_TEXT.format(self._shard, self._stream, at)) from error
        self._start, self._read, self._done = TRIM_HORIZON, None, None
        log.warning("shard %s: %s is not there any more, starting at TRIM_HORIZON", self._shard, at or "its start")

    def _batch(self, answer: Any) -> Batch:  # noqa: ANN401  boto3's stubs for it are no dependency
        kept = records = tuple(map(record_of, answer["Records"]))
        done, since = self._done, self._since
        # Once there is one behind the start, all that follow are later still.
        if done is not None:
            kept = tuple(dropwhile(lambda each: each.position.order <= done, kept))
        if since is not None:
            kept = tuple(dropwhile(lambda each: _latest_arrival(each) < since, kept))
        if records:
            self._say_gap(records[0].sequence_number)
        following = answer.get("NextShardIterator") or None
        self._empty = 0 if records else self._empty + 1
        at_tip = following is None or self._empty >= EMPTY_AT_TIP
        behind = 0.0 if at_tip else None
        if records:
            # The age of the last record, by the clock of the service that answered.
            now = date_of(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date"))
            made = records[-1].arrived
            behind = None if now is None or made is None else max(0.0, now - made)
        more = behind is not None and behind > BEHIND_SECONDS
        batch = Batch(
            records=kept,
            read_to=Position(records[-1].sequence_number) if records else None,
            behind_seconds=behind,
            wait_seconds=self._wait(idle=not records, behind=more),
            ended=following is None,
        )
        if kept:
            self._done = self._since = None
        self._iterator = following
        self._read = records[-1].sequence_number if records else self._read
        return batch


def record_of(row: Mapping[str, Any]) -> Record:
    """A stream record of boto3's as a record. Raises KeyError, TypeError or ValueError for one of another shape.

    The data is the change as the API sends it, in JSON with sorted keys: one change is the same text for every reader.
    The partition key is the item's key in the same form, one text for all changes of the item.
    """
    told = row["dynamodb"]
    number, created = told["SequenceNumber"], told.get("ApproximateCreationDateTime")
    if not (isinstance(number, str) and number.isascii() and number.isdigit()):
        raise ValueError(f"a record has {number!r} for a sequence number")
    # Whoever reads the data, Spark's columns among them, need not ask again whether these are as they should be.
    usual = isinstance(row["eventName"], str) and isinstance(row.get("userIdentity") or {}, Mapping)
    if not usual:
        raise ValueError(f"record {number} has another eventName or userIdentity than the service gives")
    return Record(
        text_of(row).encode(),
        number,
        partition_key=text_of(told["Keys"]),
        arrived=None if created is None else created.timestamp(),
    )


def text_of(value: object) -> str:
    """JSON, one text for equal values."""
    return json.dumps(value, default=_written, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _written(value: object) -> object:
    match value:
        case bytes() | bytearray():
            return b64encode(value).decode()
        case datetime():
            seconds = value.timestamp()
            return int(seconds) if seconds.is_integer() else seconds
        case _:
            raise TypeError(f"{type(value).__name__} is no value of DynamoDB's")


def _latest_arrival(record: Record) -> float:
    """The last moment at which a record of this time may have been made: times are cut to the second, or the minute."""
    if record.arrived is None:
        return float("inf")
    return record.arrived + (1.0 if record.arrived % 60 else 60.0)


class TableStream(PolledStream):
    """The stream of a table.

    clients  speak to DynamoDB Streams; they are shared by all threads
    name     the table's, whose present stream is read; or the ARN of a stream
    tables   speak to DynamoDB, which is asked for the table's stream
    rewind, poll, clock  as of a Kinesis stream
    """

    service = STREAMS
    asked_for = "StreamArn"

    def __init__(
        self,
        clients: TimedClients,
        name: str,
        tables: TimedClients,
        *,
        rewind: bool = False,
        poll: float | None = None,
        most: int | None = None,
        clock: Callable[[], float] = seconds,
    ) -> None:
        super().__init__(clients, name, rewind=rewind, poll=poll, most=most, clock=clock)
        self._tables, self._table_patience = tables, CallPatience(tables, insists=True)
        self._arn = name if is_arn(name) else ""
        self._incarnation = ""

    def arn(self, _stream: str) -> str:
        """Return the ARN of the stream listed last. Raises SourceUnavailable or SourceError."""
        return self._asked()

    def incarnation(self) -> str:
        """`account:table:creation time` of the stream listed last. Raises SourceUnavailable or SourceError."""
        if not self._incarnation:
            self.shards()
        return self._incarnation

    def shards(self) -> tuple[Shard, ...]:
        """Every page of DescribeStream. Raises SourceUnavailable or SourceError."""
        self._find()
        with said_plainly(self.name, STREAMS), understood(self.name, STREAMS):
            rows: list[Any] = []
            after: dict[str, str] = {}
            while True:
                page = self._patience.call("describe_stream", StreamArn=self._arn, Limit=PAGE, **after)
                told = page["StreamDescription"]
                rows += told["Shards"]
                if not (last := told.get("LastEvaluatedShardId")):
                    break
                after = {"ExclusiveStartShardId": last}
            self._heard(page)
            made = int(told["CreationRequestDateTime"].timestamp())
            self._incarnation = f"{self._arn.split(':')[4]}:{told['TableName']}:{made}"
            return listed(rows)

    def latest(self, lease: Lease) -> Position:
        """The present second by the service's clock: the times of records are cut to it."""
        return at_timestamp(super().latest(lease).sub // 1000 * 1000)

    def open(self, lease: Lease, start: Position) -> ChangePoller:
        """A reader that starts just after `start`."""
        return ChangePoller(
            self._clients.within(self._clients.limits[0]),
            self._asked(),
            lease.shard,
            start,
            rewind=self._rewind,
            pace=PollPace(self._poll),
            patience=CallPatience(self._clients, step=self._patience.step),
            most=self._most,
        )

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self._tables.close()

    def _asked(self) -> str:
        if not self._arn:
            self._find()
        return self._arn

    def _find(self) -> None:
        """Ask for the table's present stream: it is another one once the stream was enabled anew."""
        if is_arn(self.name):
            return
        with said_plainly(self.name, STREAMS), understood(self.name, STREAMS):
            table = self._table_patience.call("describe_table", TableName=self.name)["Table"]
            arn = table.get("LatestStreamArn")
        if not arn:
            raise SourceError(
                f"table {self.name!r} has no stream: enable one with NEW_AND_OLD_IMAGES, or whichever images are needed"
            )
        if self._arn and arn != self._arn:
            log.warning("table %s has another stream now: %s, and no longer %s", self.name, arn, self._arn)
        self._arn = arn


def is_arn(name: str) -> bool:
    """Whether this is the ARN of a stream, and no table's name."""
    return name.startswith("arn:")


def listed(rows: Sequence[Mapping[str, Any]]) -> tuple[Shard, ...]:
    """The shards of a listing. One that is the parent of another is closed, though its own page may not know yet."""
    parents = {row.get("ParentShardId") for row in rows}
    return tuple(
        Shard(
            id=row["ShardId"],
            parents=tuple(parent for parent in (row.get("ParentShardId"),) if parent),
            open="EndingSequenceNumber" not in row["SequenceNumberRange"] and row["ShardId"] not in parents,
        )
        for row in rows
    )


def region_of(name: str, options: Mapping[str, str]) -> str | None:
    """The region of this table or ARN; None: the environment's. Raises ValueError for what is neither."""
    if not is_arn(name):
        if "/" in name or "," in name:
            raise ValueError("source URL: it wants one table: dynamodb-streams://TABLE, or the ARN of a stream")
        return options.get("region")
    parts = name.split(":", 5)
    if len(parts) < 6 or parts[2] != "dynamodb" or parts[5].count("/") != 3 or "/stream/" not in parts[5]:  # noqa: PLR2004  its form
        raise ValueError(
            "source URL: the ARN is no stream's; it is arn:aws:dynamodb:REGION:ACCOUNT:table/NAME/stream/LABEL"
        )
    return options.get("region") or parts[3]


def open_url(name: str, options: Mapping[str, str], *, session: Session | None = None) -> TableStream:
    """The stream of this table, or of this ARN. Raises SourceError if no region is known, ValueError otherwise."""
    region, endpoint = region_of(name, options), options.get("endpoint")
    if options.get("if_trimmed", "TRIM_HORIZON") != "TRIM_HORIZON":
        raise ValueError("source URL: option 'if_trimmed' wants TRIM_HORIZON; without it such a shard is not read")
    poll = poll_seconds_of(options["poll_seconds"]) if "poll_seconds" in options else None
    most = max_records_of(options, ChangePoller.most)
    found = session_of(options, "source URL", session)
    clients = StreamsClients(lambda limit: patient_client("dynamodbstreams", region, endpoint, limit, found))
    tables = TableClients(lambda limit: patient_client("dynamodb", region, endpoint, limit, found))
    with said_plainly(name, STREAMS):
        clients.within(clients.limits[0])  # says at once where no region is known
    return TableStream(clients, name, tables, rewind="if_trimmed" in options, poll=poll, most=most)
