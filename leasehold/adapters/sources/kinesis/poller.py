"""Reads one shard by GetRecords, and turns the responses into user records.

A read makes one request (`Poller._ask`). The rows of the response become columns, aggregates are taken apart and
records that were done before are dropped (`Unpacking`). The batch contains the position up to which the shard was seen.

Rule 1: There are two requests a second at the tip, four while behind, and one in two seconds while nothing arrives;
fewer after throttling (`faults.PollPace`).

Rule 2: The first iterator is AT the checkpoint, and records up to it are dropped, because an aggregated record may be
half done. Later iterators are AFTER the last Kinesis record read.

Rule 3: If a response does not arrive within the longest timeout, the next requests ask for fewer records until the tip
is reached. Over a slow link, or from a busy service, megabytes may never arrive, and each try would only add to the
load.

Rule 4: If a response does not arrive within a shorter timeout, the request is repeated soon, with a longer one
(`CallPatience`).
"""

import logging
from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from botocore.exceptions import ClientError, ReadTimeoutError

from leasehold.adapters.sources.call_patience import LOOK_SECONDS, Backoff, CallPatience, StillAsked, datetime_of
from leasehold.adapters.sources.deduplication import SeenRows
from leasehold.adapters.sources.kinesis.aggregation.decode import (
    MAGIC,
    Misplaced,
    Reason,
    UserRecords,
    deaggregate,
    kept_whole,
)
from leasehold.adapters.sources.kinesis.clients import KinesisClients, seconds_of
from leasehold.adapters.sources.kinesis.faults import KINESIS, THROTTLED, PollPace, code_of, said_plainly, understood
from leasehold.adapters.sources.kinesis.hash_keys import place_of
from leasehold.adapters.sources.kinesis.records import (
    KinesisRecords,
    RecordColumns,
    RecordsPart,
    RowColumns,
    RowViews,
    TokenedColumns,
    check_shard,
    children,
)
from leasehold.adapters.sources.protocol import Batch, rows_in_columns
from leasehold.balancer.model import TRIM_HORIZON, HashRange, Position
from leasehold.errors import SourceUnavailable, Trimmed
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are not installed for users
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, RecordTypeDef, StartingPositionTypeDef

_COLUMNS = "leasehold.adapters.sources.kinesis.arrow_rows"
"""Imported only when columns are requested, because it needs pyarrow, which is an extra."""
log = escaped(logging.getLogger("leasehold.kinesis"))

_DATA, _NUMBER = itemgetter("Data"), itemgetter("SequenceNumber")


class Dropped:
    """Counts the user records of one shard that are dropped; logs each reason when it first occurs, and the totals."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._counts, self._said = Counter[Reason](), Counter[Reason]()
        self._repeated = 0

    def add(self, number: str, users: UserRecords) -> None:
        """Count the dropped user records of this Kinesis record."""
        if not users.dropped:
            return
        self._counts[users.reason] += users.dropped
        if users.reason not in self._said:
            self._said[users.reason] = users.dropped
            why = ", their aggregate came to another shard than theirs" if users.reason is Reason.OUT_OF_RANGE else ""
            text = "shard %s: %d user records of %s dropped: %s%s; more are counted until its reading ends"
            log.warning(text, self._shard, users.dropped, number, users.reason, why)

    def repeated(self, count: int) -> None:
        """Count records that were read before, because a Spark sink has sent them again."""
        self._repeated += count

    def close(self) -> None:
        """Log the counts that were not logged yet."""
        if self._repeated:
            text = "shard %s: %d records that a Spark sink had sent again were left out"
            log.info(text, self._shard, self._repeated)
            self._repeated = 0
        for reason, count in (self._counts - self._said).items():
            log.warning("shard %s: %d more user records dropped: %s", self._shard, count, reason)
        self._said = self._counts.copy()


class Unpacking:
    """Extracts the user records of a response.

    Args:
        hash_range: The hash range of the shard; None if no aggregate is misplaced.
        done: The order of a position. Records up to it are dropped; None if all records come later.
        misplaced: What to do with aggregates that have records outside the hash range.
        dropped: Counts what is dropped.
        whole: Whether to keep aggregates as they are. The position of an aggregate is that of its last user record.
        seen: Which records of Spark sinks were read before. Duplicates of these are dropped.

    Attributes:
        size: The payload bytes of the rows.
        subs: The number of user records in the last row, dropped ones included.
    """

    def __init__(
        self,
        hash_range: HashRange | None,
        done: tuple[int, int, int] | None,
        *,
        misplaced: Misplaced,
        dropped: Dropped,
        whole: bool = False,
        seen: SeenRows | None = None,
    ) -> None:
        self._hash_range, self._misplaced, self._dropped = hash_range, misplaced, dropped
        self._whole = whole
        self.done = done
        self.seen = (
            SeenRows() if seen is None else seen.copy()
        )  # a copy, because the response may have to be requested again
        self._parts: list[RecordsPart] = []
        self.size = self.subs = 0

    @property
    def records(self) -> KinesisRecords:
        """The records that were not dropped, in order."""
        return KinesisRecords(self._parts)

    def take(self, told: "RowViews | RowColumns | list[RecordTypeDef]") -> None:
        """Unpack all rows and empty `told`."""
        rows = columns_of(told)
        self.size += sum(map(len, rows.datas))
        if self.done is None and not rows.sealed:
            self._take_plain(rows, 0, len(rows))
            return
        if self._whole:
            for index in range(len(rows)):
                self._take_whole(rows, index)
            return
        for aggregates, group in groupby(range(len(rows)), lambda at: rows.datas[at].startswith(MAGIC)):
            if aggregates or self.done is not None:
                for index in group:
                    self._take_apart(rows, index)
            else:
                indexes = [*group]
                self._take_plain(rows, indexes[0], indexes[-1] + 1)

    def _take_plain(self, rows: RowColumns, begin: int, end: int) -> None:
        records, count = self._columns(), end - begin
        records.datas += rows.datas[begin:end]
        records.numbers += rows.numbers[begin:end]
        records.subs += [0] * count
        records.keys += rows.keys[begin:end]
        records.hash_keys += [None] * count
        records.arrived += rows.arrived[begin:end]
        records.aggregated += [False] * count
        if isinstance(records, TokenedColumns):
            records.tokens += [self.seen.token] * count
        self.subs = min(count, 1)

    def _take_whole(self, rows: RowColumns, at: int) -> None:
        users = deaggregate(rows.datas[at])
        self.subs = max(len(users) + users.dropped, 1)
        last = self.subs - 1
        if self.done is not None:
            # A reader of user records may have stopped within the aggregate. Then it is not done, and is read again.
            if (1, int(rows.numbers[at]), last) <= self.done:
                return
            self.done = None
        self._take_plain(rows, at, at + 1)
        self._columns().subs[-1] = last
        self.subs = last + 1

    def _take_apart(self, rows: RowColumns, at: int) -> None:
        data, number, arrived = rows.datas[at], rows.numbers[at], rows.arrived[at]
        rows.datas[at] = b""
        plain = self.done is None and not self.seen
        located = kept_whole(data, number, arrived, self._hash_range) if plain else None
        if located is not None:
            self._parts.append(located)
            self.subs = len(located)
            return
        users = deaggregate(data, rows.keys[at], None, self._hash_range, misplaced=self._misplaced)
        self._dropped.add(number, users)
        first = 0
        if self.done is not None:
            # The index of the first user record that is not done. All records after that one are not done either.
            sequence = int(number)
            first = bisect(users.subs, self.done, key=lambda sub: (1, sequence, sub))
            self.done = None if first < len(users) else self.done
        self.subs = len(users) + users.dropped
        if users.tags:
            self._take_tagged(number, arrived, users, first)
            return
        records, count = self._columns(), len(users) - first
        # Usually nothing is dropped, so avoid another copy of the columns.
        records.datas += users.datas[first:] if first else users.datas
        records.numbers += [number] * count
        records.subs += users.subs[first:]
        records.keys += users.keys[first:] if first else users.keys
        records.hash_keys += users.hash_keys[first:] if first else users.hash_keys
        records.arrived += [arrived] * count
        records.aggregated += [users.aggregated] * count
        if isinstance(records, TokenedColumns):
            records.tokens += [self.seen.token] * count

    def _take_tagged(self, number: str, arrived: float | None, users: UserRecords, first: int) -> None:
        """Add the records of a Spark sink's aggregate that were not read before, with the tokens of their positions."""
        records, tokens = RecordColumns(), list[str]()
        for index in range(first, len(users)):
            key, hash_key, tag = users.keys[index], users.hash_keys[index], users.tags[index]
            position = Position(number, users.subs[index])
            if tag is not None and self.seen.seen_before(tag, partial(place_of, key, hash_key), position):
                continue
            records.datas.append(users.datas[index])
            records.subs.append(users.subs[index])
            records.keys.append(key)
            records.hash_keys.append(hash_key)
            tokens.append(self.seen.token)
        records.numbers, records.arrived = [number] * len(tokens), [arrived] * len(tokens)
        records.aggregated = [True] * len(tokens)
        self._dropped.repeated(len(users) - first - len(tokens))
        self._parts.append(records.tokened(tokens))

    def _columns(self) -> RecordColumns:
        """Return the last part if it has columns of the right kind, else append a new part."""
        wanted = TokenedColumns if self.seen else RecordColumns
        if not self._parts or type(last := self._parts[-1]) is not wanted:
            self._parts.append(last := wanted())
        return last


def columns_of(rows: "RowViews | RowColumns | list[RecordTypeDef]") -> RowColumns:
    """Turn the rows of a response into columns, and empty `rows`.

    Whether a sequence number is decimal is checked elsewhere, and only of the last one.

    Raises:
        TypeError: If a sequence number or a partition key is not a string.
    """
    if isinstance(rows, RowColumns):
        return rows
    if not isinstance(rows, list):
        converted = rows.columns()
        rows.clear()
        return converted
    columns = RowColumns()
    columns.datas += map(_DATA, rows)
    columns.numbers += map(_NUMBER, rows)
    "".join(columns.numbers)  # the quickest check that all of them are strings
    columns.keys += [row.get("PartitionKey") for row in rows]
    if not {str, NoneType}.issuperset(map(type, columns.keys)):
        raise TypeError("a record has a partition key that is not a string")
    columns.arrived += [seconds_of(row.get("ApproximateArrivalTimestamp")) for row in rows]
    columns.sealed = any(data.startswith(MAGIC) for data in columns.datas)
    rows.clear()
    return columns


FAULT_SECONDS = 0.4, 10.0
RECORDS = 10_000
NO_ANSWER = "the stream has sent nothing, not even how far behind this is"
STILL_ASKED = "the stream has not answered the last request yet"
FEWER = 8  # divides the number of records requested after a timeout

TRIMMED_TEXT = (
    "shard {} of stream {!r}: its checkpoint {} is not there any more: trimmed, or of an earlier stream of this name; "
    "set it with `leasehold reset`, or add if_trimmed=TRIM_HORIZON to the source URL to begin with the oldest record"
)


class Poller:
    """A reader of one shard.

    Args:
        client: The client of the service.
        stream: The name of the stream.
        shard: The id of the shard.
        start: Where to start: just after a sequence number, or at a sentinel or a time.
        hash_range: The hash range of the shard; None if no aggregate is misplaced.
        misplaced: What to do with aggregates that have records outside the hash range.
        whole: Whether aggregates are dispatched as they are.
        rewind: Whether to start at the oldest record if the start was trimmed.
        pace: The pauses between requests.
        patience: The timeouts; by default that of the client.
        most: The most records that one request asks for; by default the service's maximum.
    """

    most = RECORDS
    """The most records that one request asks for."""
    service = KINESIS
    names: ClassVar[Mapping[str, str]] = {
        "Stream": "StreamName",
        "Type": "ShardIteratorType",
        "SequenceNumber": "StartingSequenceNumber",
        "Timestamp": "Timestamp",
    }
    """The parameter names of this service's GetShardIterator."""

    def __init__(
        self,
        client: "KinesisClient",
        stream: str,
        shard: str,
        start: Position,
        hash_range: HashRange | None,
        *,
        misplaced: Misplaced = "keep",
        whole: bool = False,
        rewind: bool = False,
        pace: PollPace | None = None,
        patience: CallPatience | None = None,
        most: int | None = None,
    ) -> None:
        self.most = most or self.most
        self._stream, self._shard = stream, shard
        self._patience = patience or CallPatience(KinesisClients.of(client))
        self._start, self._hash_range, self._rewind = start, hash_range, rewind
        self._misplaced, self._whole, self._dropped = misplaced, whole, Dropped(shard)
        self._done = start.order if start.numbered else None
        self._seen = SeenRows.of(start)
        self._iterator: str | None = None
        self._read: str | None = None
        self._pace = pace or PollPace()
        self._limit = self.most
        self._faults = Backoff(*FAULT_SECONDS)

    def read(self) -> Batch:
        """Call GetRecords once. An expired iterator is replaced at the next call.

        If a fault may be temporary, return an empty batch with a longer wait.

        Raises:
            SourceError: If trying again cannot help.
        """
        try:
            batch = self._next()
        except StillAsked:
            # Without a fault, an empty batch would count as a response, as if the shard were being read.
            return Batch((), None, None, LOOK_SECONDS, fault=STILL_ASKED, answered=False)
        except SourceUnavailable as fault:
            grew = isinstance(fault.__cause__, ReadTimeoutError) and self._patience.grew
            if isinstance(fault.__cause__, ReadTimeoutError) and not grew:  # rule 3
                self._limit = max(self._limit // FEWER, 1)
            throttled = isinstance(fault.__cause__, ClientError) and code_of(fault.__cause__) in THROTTLED
            if throttled:
                self._pace.throttled()
            wait = FAULT_SECONDS[0] if grew else self._faults.next()  # rule 4
            empty = Batch((), None, None, wait, fault=str(fault), answered=throttled)
            log.warning("shard %s: reading again in %.1f s: %s", self._shard, wait, fault)
            return empty
        if batch is None:
            return Batch((), None, None, self._wait(idle=True), fault=NO_ANSWER)
        self._faults.reset()
        if not batch.behind_seconds:
            self._limit = self.most
        return batch

    def close(self) -> None:
        """Log what was dropped. The client stays open, because it belongs to the source."""
        self._dropped.close()

    def _next(self) -> Batch | None:
        """Return the batch of the next response, or None if there was none.

        If a response cannot be read, nothing of it counts as read, and the request is made again.
        """
        with understood(self._stream, self.service):
            response = self._ask()
        if response is None:
            return None
        state = self._iterator, self._read, self._done, self._seen
        try:
            with understood(self._stream, self.service):
                return self._batch(response)
        except SourceUnavailable:
            self._iterator, self._read, self._done, self._seen = state
            self._ask_again()
            raise

    def _ask_again(self) -> None:
        """Do nothing, because the iterator was restored."""

    def _ask(self) -> "GetRecordsOutputTypeDef | None":
        with said_plainly(self._stream, self.service):
            if self._iterator is None:
                self._iterator = self._placed()
            try:
                response = self._patience.ask("get_records", ShardIterator=self._iterator, Limit=self._limit)
                return cast("GetRecordsOutputTypeDef", response)
            except ClientError as error:
                if not self._over(error):
                    raise
        self._iterator = None
        log.info("shard %s: its iterator expired, taking a new one", self._shard)
        return None

    def _over(self, error: ClientError) -> bool:
        """Return whether the request failed because of its iterator, and a new one helps."""
        return code_of(error) == "ExpiredIteratorException"

    def _placed(self) -> str:
        """Return a new iterator. If the start was trimmed, retry at the oldest record if `rewind` is set."""
        start: dict[str, Any] = {"Stream": self._stream, **self._place()}
        parameters = {self.names[name]: value for name, value in start.items()}
        try:
            response = self._patience.ask("get_shard_iterator", ShardId=self._shard, **parameters)
        except ClientError as error:
            self._rewind_from(error)
            return self._placed()
        return cast("str", response["ShardIterator"])

    def _rewind_from(self, error: ClientError) -> None:
        """Start at the oldest record if the start was trimmed and `rewind` is set; else raise Trimmed or `error`."""
        trimmed = code_of(error) == "InvalidArgumentException" and self._start.numbered and self._read is None
        if not trimmed:
            raise error
        if not self._rewind:
            raise Trimmed(TRIMMED_TEXT.format(self._shard, self._stream, self._start.sequence)) from error
        trimmed_number, self._start, self._done = self._start.sequence, TRIM_HORIZON, None
        log.warning("shard %s: %s is not there any more, starting at TRIM_HORIZON", self._shard, trimmed_number)

    def _place(self) -> "StartingPositionTypeDef":
        if self._read is not None:
            return {"Type": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": self._read}
        if self._start.numbered:
            return {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._start.sequence}
        if self._start.sequence == "AT_TIMESTAMP":
            return {"Type": "AT_TIMESTAMP", "Timestamp": datetime_of(self._start)}
        return {"Type": "LATEST" if self._start.sequence == "LATEST" else "TRIM_HORIZON"}

    def _batch(self, answer: "GetRecordsOutputTypeDef") -> Batch:
        rows, behind = columns_of(answer["Records"]), answer.get("MillisBehindLatest") or 0
        first, last = (rows.numbers[0], rows.numbers[-1]) if rows.numbers else (None, None)
        following = children(answer.get("ChildShards", ()))
        check_shard(self._shard, first, following)
        unpacked = Unpacking(
            self._hash_range,
            self._done,
            misplaced=self._misplaced,
            whole=self._whole,
            dropped=self._dropped,
            seen=self._seen,
        )
        unpacked.take(rows)
        self._done, self._seen = unpacked.done, unpacked.seen
        token = unpacked.seen.token
        if first is not None:
            self._say_gap(first)
        batch = Batch(
            records=unpacked.records,
            # Dropped records count as seen, otherwise a tail of dropped records could never be checkpointed.
            read_to=None if last is None else Position(last, max(unpacked.subs - 1, 0), token),
            behind_seconds=behind / 1000,
            wait_seconds=self._wait(idle=last is None and not behind, behind=behind > 0),
            ended=not answer.get("NextShardIterator"),
            children=following,
            size=unpacked.size,
            in_columns=partial(rows_in_columns, _COLUMNS, self._stream, self._shard),
            token=token,
            undecided=self._seen.undecided(),
        )
        self._iterator, self._read = answer.get("NextShardIterator") or None, last or self._read
        return batch

    def _say_gap(self, first: str) -> None:
        # If the record AT the checkpoint was trimmed, the service starts with a later one.
        if self._read is None and self._start.numbered and int(first) > int(self._start.sequence):
            gap = f"the record of its checkpoint, {self._start.sequence}, was trimmed; reading goes on at {first}"
            log.warning("shard %s: %s, and what lay between, if anything, is lost", self._shard, gap)

    def _wait(self, *, idle: bool, behind: bool = False) -> float:
        return self._pace.answered(idle=idle, behind=behind)
