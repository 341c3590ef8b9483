"""Reads one shard by GetRecords: where it starts, how often it asks, and what it makes of the answers.

Rule 1: never more than five requests per second, growing to one in two seconds where nothing comes.
Rule 2: the first iterator is AT the checkpoint, and records up to it are dropped, since an aggregated
record may be half done; a refreshed one is AFTER the last Kinesis record read.
Rule 3: after an answer that did not come in time less is asked for, until the tip is reached: over a slow link, or
from a busy service, megabytes may never come, and each try would only add to the load.
"""

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError, ReadTimeoutError

from adapters.backoff import Backoff
from adapters.kinesis.aggregation import deaggregate
from adapters.kinesis.faults import code_of, said_plainly
from adapters.kinesis.shards import children
from adapters.source import Batch, Record, SourceError, SourceUnavailable
from balancer.model import TRIM_HORIZON, HashRange, Position

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, RecordTypeDef, StartingPositionTypeDef

log = logging.getLogger("leasehold.kinesis")

LEAST_SECONDS = 0.2
IDLE_SECONDS = 2.0
FAULT_SECONDS = 10.0
RECORDS = 10_000
FEWER = 8  # times fewer records after a time-out

_TRIMMED = (
    "shard {} of stream {!r}: its checkpoint {} is not there any more: trimmed, or of an earlier stream of this name; "
    "set it with `leasehold reset`, or add if_trimmed=TRIM_HORIZON to the source URL to begin with the oldest record"
)


class Poller:
    """A reader of one shard.

    client      speaks to the service
    stream      its name
    shard       the shard's id
    start       where to start: a number is done with, a sentinel or a time is not
    hash_range  the shard's own: aggregates with a record outside are dropped, as KCL does; None: all are kept
    rewind      whether to begin with the oldest record there is where the start is not there any more
    """

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        shard: str,
        start: Position,
        hash_range: HashRange | None,
        *,
        rewind: bool = False,
    ) -> None:
        self._client, self._stream, self._shard = client, stream, shard
        self._start, self._hash_range, self._rewind = start, hash_range, rewind
        self._done = start.order if start.numbered else None
        self._iterator: str | None = None
        self._read: str | None = None
        self._idle = LEAST_SECONDS
        self._limit = RECORDS
        self._faults = Backoff(2 * LEAST_SECONDS, FAULT_SECONDS)

    def read(self) -> Batch:
        """One GetRecords; an iterator that expired is replaced at the next call.

        A passing fault is an empty batch with a longer wait. Raises SourceError if trying again cannot help.
        """
        try:
            answer = self._ask()
        except SourceUnavailable as fault:
            if isinstance(fault.__cause__, ReadTimeoutError):  # rule 3
                self._limit = max(self._limit // FEWER, 1)
            wait = self._faults.next()
            log.warning("shard %s: reading again in %.1f s: %s", self._shard, wait, fault)
            return Batch((), None, None, wait)
        if answer is None:
            return Batch((), None, None, self._wait(idle=True))
        self._faults.reset()
        if not answer.get("MillisBehindLatest"):
            self._limit = RECORDS
        return self._batch(answer)

    def close(self) -> None:
        """Nothing to let go: the client is the source's."""

    def _ask(self) -> "GetRecordsOutputTypeDef | None":
        with said_plainly(self._stream):
            if self._iterator is None:
                self._iterator = self._placed()
            try:
                return self._client.get_records(ShardIterator=self._iterator, Limit=self._limit)
            except ClientError as error:
                if code_of(error) != "ExpiredIteratorException":
                    raise
        log.info("shard %s: its iterator expired, taking a new one", self._shard)
        self._iterator = None
        return None

    def _placed(self) -> str:
        try:
            return self._iterator_at(self._place())
        except ClientError as error:
            self._rewind_from(error)
        return self._iterator_at(self._place())

    def _iterator_at(self, place: "StartingPositionTypeDef") -> str:
        more: dict[str, Any] = {}
        if "SequenceNumber" in place:
            more["StartingSequenceNumber"] = place["SequenceNumber"]
        if "Timestamp" in place:
            more["Timestamp"] = place["Timestamp"]
        return self._client.get_shard_iterator(
            StreamName=self._stream, ShardId=self._shard, ShardIteratorType=place["Type"], **more
        )["ShardIterator"]

    def _rewind_from(self, error: ClientError) -> None:
        """Go back to the oldest record, if the start was trimmed and that is wanted. Raises SourceError, or `error`."""
        trimmed = code_of(error) == "InvalidArgumentException" and self._start.numbered and self._read is None
        if not trimmed:
            raise error
        if not self._rewind:
            raise SourceError(_TRIMMED.format(self._shard, self._stream, self._start.sequence)) from error
        log.warning("shard %s: %s is not there any more, starting at TRIM_HORIZON", self._shard, self._start.sequence)
        self._start, self._done = TRIM_HORIZON, None

    def _place(self) -> "StartingPositionTypeDef":
        if self._read is not None:
            return {"Type": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": self._read}
        if self._start.numbered:
            return {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._start.sequence}
        if self._start.sequence == "AT_TIMESTAMP":
            return {"Type": "AT_TIMESTAMP", "Timestamp": datetime.fromtimestamp(self._start.sub / 1000, UTC)}
        return {"Type": "LATEST" if self._start.sequence == "LATEST" else "TRIM_HORIZON"}

    def _batch(self, answer: "GetRecordsOutputTypeDef") -> Batch:
        rows = answer["Records"]
        self._iterator = answer.get("NextShardIterator") or None
        behind = answer.get("MillisBehindLatest") or 0
        subs = 0
        records: list[Record] = []
        for row in rows:
            subs = self._unpack(row, records)
        if rows:
            self._say_gap(rows[0]["SequenceNumber"])
            self._read = rows[-1]["SequenceNumber"]
        return Batch(
            records=tuple(records),
            # Records that were dropped count as seen, or a tail of nothing else could never be checkpointed.
            read_to=Position(rows[-1]["SequenceNumber"], max(subs - 1, 0)) if rows else None,
            behind_seconds=behind / 1000,
            wait_seconds=self._wait(idle=not rows and not behind),
            ended=self._iterator is None,
            children=children(answer.get("ChildShards", ())),
            size=sum(len(row["Data"]) for row in rows),
        )

    def _say_gap(self, first: str) -> None:
        """The first read is AT the checkpoint: what comes instead came after something that was trimmed."""
        if self._read is None and self._start.numbered and int(first) > int(self._start.sequence):
            known = f"the record of its checkpoint, {self._start.sequence}, was trimmed; reading goes on at {first}"
            log.warning("shard %s: %s, and what lay between, if anything, is lost", self._shard, known)

    def _wait(self, *, idle: bool) -> float:
        self._idle = min(2 * self._idle, IDLE_SECONDS) if idle else LEAST_SECONDS
        return self._idle

    def _unpack(self, row: "RecordTypeDef", records: list[Record]) -> int:
        """Append a Kinesis record's user records that are not done yet; how many there were, dropped ones too."""
        key = row.get("PartitionKey")  # a stream that spreads records itself has none
        users = deaggregate(row["Data"], key, None, self._hash_range)
        if users.dropped:
            log.warning(
                "shard %s: %d user records of %s dropped: %s",
                self._shard,
                users.dropped,
                row["SequenceNumber"],
                users.reason,
            )
        number, arrived, aggregated = row["SequenceNumber"], _arrived(row), users.aggregated
        fresh = [
            Record(data, number, sub, user_key, hash_key, arrived, aggregated)
            for sub, (user_key, hash_key, data) in enumerate(users.rows)
        ]
        records += fresh if self._done is None else self._later(fresh, self._done)
        return len(users) + users.dropped

    def _later(self, records: list[Record], done: tuple[int, int, int]) -> list[Record]:
        later = [record for record in records if record.position.order > done]
        if later:
            self._done = None  # all that follows is later still
        return later


def _arrived(row: "RecordTypeDef") -> float | None:
    return row["ApproximateArrivalTimestamp"].timestamp() if "ApproximateArrivalTimestamp" in row else None
