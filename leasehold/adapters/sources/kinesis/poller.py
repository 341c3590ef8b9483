"""Reads one shard by GetRecords, and turns the responses into user records.

Each read makes one request (`Poller._request`). The rows of the response are converted to columns, aggregates are
unpacked, and records that were already processed are dropped (`Unpacker`). The resulting batch contains the position up
to which the shard has been read.

Rule 1: Requests are made four times a second while behind the tip, twice a second at the tip while records arrive, and
every two seconds while nothing arrives. After throttling they are made less often (`faults.PollPace`).

Rule 2: The first iterator starts AT the checkpoint, because the checkpoint may be inside an aggregated record. Records
up to the checkpoint are dropped. Later iterators start AFTER the last Kinesis record read.

Rule 3: If a request exceeds the longest timeout (see rule 4), the next requests ask for fewer records until the tip is
reached. If the network is slow or the service is busy, a response of several megabytes may never arrive in time, and
each retry would only add to the load.

Rule 4: If a request exceeds any other timeout, it is soon repeated with the next longer one (`CallTimeouts`).
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

from leasehold.adapters.sources.call_timeouts import (
    PENDING_CHECK_SECONDS,
    Backoff,
    CallTimeouts,
    ResponsePending,
    datetime_at_position,
)
from leasehold.adapters.sources.deduplication import SeenRows
from leasehold.adapters.sources.kinesis.aggregation.decode import (
    MAGIC,
    Misplaced,
    Reason,
    UserRecords,
    deaggregate,
    locate_records,
)
from leasehold.adapters.sources.kinesis.clients import KinesisClients, parse_record_time
from leasehold.adapters.sources.kinesis.faults import (
    KINESIS,
    THROTTLED,
    PollPace,
    error_code,
    translate_errors,
    translate_parse_errors,
)
from leasehold.adapters.sources.kinesis.hash_keys import find_hash_key
from leasehold.adapters.sources.kinesis.records import (
    KinesisRecords,
    RecordColumns,
    RecordsPart,
    RowColumns,
    RowViews,
    TokenedColumns,
    check_shard_is_ours,
    convert_child_shards,
)
from leasehold.adapters.sources.protocol import Batch, import_and_call_rows_of
from leasehold.balancer.model import TRIM_HORIZON, HashRange, Position
from leasehold.errors import SourceUnavailable, Trimmed
from leasehold.stores.printable import make_safe_logger

if TYPE_CHECKING:  # the stubs are not installed for users
    from types_boto3_kinesis import KinesisClient
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, RecordTypeDef, StartingPositionTypeDef

_COLUMNS = "leasehold.adapters.sources.kinesis.arrow_rows"
"""The module that creates Arrow columns. It is imported only when columns are requested, because it needs pyarrow,
which is an optional dependency."""
log = make_safe_logger(logging.getLogger("leasehold.kinesis"))

_get_data, _get_number = itemgetter("Data"), itemgetter("SequenceNumber")


class DropCounter:
    """Counts the user records of a shard that are dropped.

    Each reason is logged when it first occurs, and the totals are logged when the reader is closed.
    """

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._drop_counts, self._logged_counts = Counter[Reason](), Counter[Reason]()
        self._duplicates = 0

    def count_dropped(self, sequence_number: str, user_records: UserRecords) -> None:
        """Count the dropped user records of this Kinesis record."""
        if not user_records.dropped:
            return
        self._drop_counts[user_records.reason] += user_records.dropped
        if user_records.reason not in self._logged_counts:
            self._logged_counts[user_records.reason] = user_records.dropped
            explanation = (
                ", because their aggregate went to another shard" if user_records.reason is Reason.OUT_OF_RANGE else ""
            )
            message = "shard %s: %d user records of %s dropped: %s%s; more are counted until the reader closes"
            log.warning(message, self._shard, user_records.dropped, sequence_number, user_records.reason, explanation)

    def count_duplicates(self, count: int) -> None:
        """Count duplicates, which are records that a Spark sink sent again."""
        self._duplicates += count

    def log_totals(self) -> None:
        """Log the counts that were not logged yet."""
        if self._duplicates:
            message = "shard %s: %d duplicates from a Spark sink were dropped"
            log.info(message, self._shard, self._duplicates)
            self._duplicates = 0
        for reason, count in (self._drop_counts - self._logged_counts).items():
            log.warning("shard %s: %d more user records dropped: %s", self._shard, count, reason)
        self._logged_counts = self._drop_counts.copy()


class Unpacker:
    """Extracts the user records of a response.

    Args:
        hash_range: The hash range of the shard. User records outside it are misplaced. None to keep all of them.
        skip_through: Records up to this position (as `Position.order`) are dropped. None to keep all records.
        misplaced: What to do with aggregates that have records outside the hash range.
        drop_counter: Counts the records that are dropped.
        whole_aggregates: Whether to keep aggregates as they are. An aggregate has the position of its last user record.
        seen_rows: The rows of Spark sinks that were already read. Their duplicates are dropped. A record's tag
            identifies its row, and the token of a position contains this state (`sources/deduplication.py`).

    Attributes:
        size: The size of the rows' payloads, in bytes.
        subs: The number of user records in the last row, including dropped ones.
    """

    def __init__(
        self,
        hash_range: HashRange | None,
        skip_through: tuple[int, int, int] | None,
        *,
        misplaced: Misplaced,
        drop_counter: DropCounter,
        whole_aggregates: bool = False,
        seen_rows: SeenRows | None = None,
    ) -> None:
        self._hash_range, self._misplaced, self._dropped = hash_range, misplaced, drop_counter
        self._whole_aggregates = whole_aggregates
        self.skip_through = skip_through
        self.seen = (
            SeenRows() if seen_rows is None else seen_rows.copy()
        )  # a copy, because the response may have to be requested again
        self._parts: list[RecordsPart] = []
        self.size = self.subs = 0

    @property
    def records(self) -> KinesisRecords:
        """The records that were not dropped, in order."""
        return KinesisRecords(self._parts)

    def unpack_rows(self, response_rows: "RowViews | RowColumns | list[RecordTypeDef]") -> None:
        """Unpack all rows and empty `response_rows`."""
        rows = convert_to_columns(response_rows)
        self.size += sum(map(len, rows.payloads))
        if self.skip_through is None and not rows.has_aggregates:
            self._unpack_plain(rows, 0, len(rows))
            return
        if self._whole_aggregates:
            for index in range(len(rows)):
                self._unpack_whole(rows, index)
            return
        for are_aggregates, row_indexes in groupby(
            range(len(rows)), lambda index: rows.payloads[index].startswith(MAGIC)
        ):
            if are_aggregates or self.skip_through is not None:
                for index in row_indexes:
                    self._unpack_aggregate(rows, index)
            else:
                indexes = [*row_indexes]
                self._unpack_plain(rows, indexes[0], indexes[-1] + 1)

    def _unpack_plain(self, rows: RowColumns, begin: int, end: int) -> None:
        records, count = self._last_columns(), end - begin
        records.payloads += rows.payloads[begin:end]
        records.numbers += rows.numbers[begin:end]
        records.subs += [0] * count
        records.keys += rows.keys[begin:end]
        records.hash_keys += [None] * count
        records.arrived += rows.arrived[begin:end]
        records.aggregated += [False] * count
        if isinstance(records, TokenedColumns):
            records.tokens += [self.seen.token] * count
        self.subs = min(count, 1)

    def _unpack_whole(self, rows: RowColumns, index: int) -> None:
        user_records = deaggregate(rows.payloads[index])
        self.subs = max(len(user_records) + user_records.dropped, 1)
        last_sub = self.subs - 1
        if self.skip_through is not None:
            # If the checkpoint is inside this aggregate, because an earlier reader unpacked it, the whole aggregate is
            # returned again.
            if (1, int(rows.numbers[index]), last_sub) <= self.skip_through:
                return
            self.skip_through = None
        self._unpack_plain(rows, index, index + 1)
        self._last_columns().subs[-1] = last_sub
        self.subs = last_sub + 1

    def _unpack_aggregate(self, rows: RowColumns, index: int) -> None:
        data, number, arrival_time = rows.payloads[index], rows.numbers[index], rows.arrived[index]
        # The row may also be a plain record, because all rows are unpacked one by one until `skip_through` is passed.
        rows.payloads[index] = b""
        # If no user record is to be skipped or may be a duplicate, note only where they are, without copying them.
        is_locating_possible = self.skip_through is None and not self.seen
        located_records = locate_records(data, number, arrival_time, self._hash_range) if is_locating_possible else None
        if located_records is not None:
            self._parts.append(located_records)
            self.subs = len(located_records)
            return
        user_records = deaggregate(data, rows.keys[index], None, self._hash_range, misplaced=self._misplaced)
        self._dropped.count_dropped(number, user_records)
        first_kept_index = 0
        if self.skip_through is not None:
            # Find the index of the first user record to keep. All records after it are kept, too.
            sequence_number = int(number)
            first_kept_index = bisect(user_records.subs, self.skip_through, key=lambda sub: (1, sequence_number, sub))
            self.skip_through = None if first_kept_index < len(user_records) else self.skip_through
        self.subs = len(user_records) + user_records.dropped
        if user_records.tags:
            self._unpack_tagged(number, arrival_time, user_records, first_kept_index)
            return
        records, kept_count = self._last_columns(), len(user_records) - first_kept_index
        # Usually nothing is dropped, so don't copy the columns again.
        records.payloads += user_records.payloads[first_kept_index:] if first_kept_index else user_records.payloads
        records.numbers += [number] * kept_count
        records.subs += user_records.subs[first_kept_index:]
        records.keys += user_records.keys[first_kept_index:] if first_kept_index else user_records.keys
        records.hash_keys += user_records.hash_keys[first_kept_index:] if first_kept_index else user_records.hash_keys
        records.arrived += [arrival_time] * kept_count
        records.aggregated += [user_records.aggregated] * kept_count
        if isinstance(records, TokenedColumns):
            records.tokens += [self.seen.token] * kept_count

    def _unpack_tagged(
        self, sequence_number: str, arrival_time: float | None, user_records: UserRecords, first_index: int
    ) -> None:
        """Add the records of a Spark sink's aggregate that were not read before, with the tokens of their positions."""
        records, tokens = RecordColumns(), list[str]()
        for index in range(first_index, len(user_records)):
            key, hash_key, tag = user_records.keys[index], user_records.hash_keys[index], user_records.tags[index]
            position = Position(sequence_number, user_records.subs[index])
            if tag is not None and self.seen.check_duplicate(tag, partial(find_hash_key, key, hash_key), position):
                continue
            records.payloads.append(user_records.payloads[index])
            records.subs.append(user_records.subs[index])
            records.keys.append(key)
            records.hash_keys.append(hash_key)
            tokens.append(self.seen.token)
        records.numbers, records.arrived = [sequence_number] * len(tokens), [arrival_time] * len(tokens)
        records.aggregated = [True] * len(tokens)
        self._dropped.count_duplicates(len(user_records) - first_index - len(tokens))
        self._parts.append(records.with_tokens(tokens))

    def _last_columns(self) -> RecordColumns:
        """Return the last part if it has columns of the right kind. Otherwise, append a new part and return it."""
        columns_type = TokenedColumns if self.seen else RecordColumns
        if not self._parts or type(last_part := self._parts[-1]) is not columns_type:
            self._parts.append(last_part := columns_type())
        return last_part


def convert_to_columns(rows: "RowViews | RowColumns | list[RecordTypeDef]") -> RowColumns:
    """Turn the rows of a response into columns, and empty `rows`.

    The caller checks that the last sequence number is decimal, by making it a `Position`.

    Raises:
        TypeError: If a sequence number or a partition key is not a string.
    """
    if isinstance(rows, RowColumns):
        return rows
    if not isinstance(rows, list):
        row_columns = rows.to_row_columns()
        rows.clear()
        return row_columns
    columns = RowColumns()
    columns.payloads += map(_get_data, rows)
    columns.numbers += map(_get_number, rows)
    "".join(columns.numbers)  # the quickest check that all of them are strings
    columns.keys += [row.get("PartitionKey") for row in rows]
    if not {str, NoneType}.issuperset(map(type, columns.keys)):
        raise TypeError("a record has a partition key that is not a string")
    columns.arrived += [parse_record_time(row.get("ApproximateArrivalTimestamp")) for row in rows]
    columns.has_aggregates = any(data.startswith(MAGIC) for data in columns.payloads)
    rows.clear()
    return columns


FAULT_SECONDS = 0.4, 10.0
MAX_RECORDS = 10_000
NO_RESPONSE = "the stream has sent neither records nor how far behind this reader is"
RESPONSE_IS_PENDING = "the stream has not responded to the last request yet"
LIMIT_DIVISOR = 8  # divides the number of records requested after a timeout

TRIMMED_TEXT = (
    "shard {} of stream {!r}: its checkpoint {} no longer exists: it was trimmed, or belongs to an earlier stream of "
    "this name; set it with `leasehold reset`, or add if_trimmed=TRIM_HORIZON to the source URL to start at the oldest "
    "record"
)


class Poller:
    """A reader of one shard.

    Args:
        client: The client of the service.
        stream: The name of the stream.
        shard: The id of the shard.
        start: Where to start: just after a sequence number, or at a sentinel or a time.
        hash_range: The hash range of the shard. User records outside it are misplaced. None to keep all of them.
        misplaced: What to do with aggregates that have records outside the hash range.
        whole_aggregates: Whether to return aggregates as they are, instead of their user records.
        rewind: Whether to start at the oldest record if the start was trimmed.
        pace: The pauses between requests.
        timeouts: The timeouts; by default those of the client.
        max_records: The maximum number of records per request; by default the service's limit.
    """

    max_records = MAX_RECORDS
    """The maximum number of records per request."""
    service = KINESIS
    parameter_names: ClassVar[Mapping[str, str]] = {
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
        whole_aggregates: bool = False,
        rewind: bool = False,
        pace: PollPace | None = None,
        timeouts: CallTimeouts | None = None,
        max_records: int | None = None,
    ) -> None:
        self.max_records = max_records or self.max_records
        self._stream, self._shard = stream, shard
        self._timeouts = timeouts or CallTimeouts(KinesisClients.of(client))
        self._start, self._hash_range, self._rewind = start, hash_range, rewind
        self._misplaced, self._whole_aggregates, self._dropped = misplaced, whole_aggregates, DropCounter(shard)
        self._skip_through = start.order if start.numbered else None
        self._seen = SeenRows.of(start)
        self._iterator: str | None = None
        self._last_read: str | None = None
        self._pace = pace or PollPace()
        self._limit = self.max_records
        self._backoff = Backoff(*FAULT_SECONDS)

    def read(self) -> Batch:
        """Call GetRecords once. An expired iterator is replaced at the next call.

        If a fault may be temporary, return an empty batch with a longer wait.

        Raises:
            SourceError: If trying again cannot help.
        """
        try:
            batch = self._read_batch()
        except ResponsePending:
            # The batch must contain a fault. An empty batch without a fault would mean that the service has responded.
            return Batch((), None, None, PENDING_CHECK_SECONDS, fault=RESPONSE_IS_PENDING, answered=False)
        except SourceUnavailable as fault:
            was_timeout_lengthened = isinstance(fault.__cause__, ReadTimeoutError) and self._timeouts.was_lengthened
            if isinstance(fault.__cause__, ReadTimeoutError) and not was_timeout_lengthened:  # rule 3
                self._limit = max(self._limit // LIMIT_DIVISOR, 1)
            is_throttled = isinstance(fault.__cause__, ClientError) and error_code(fault.__cause__) in THROTTLED
            if is_throttled:
                self._pace.slow_down()
            wait_seconds = FAULT_SECONDS[0] if was_timeout_lengthened else self._backoff.next()  # rule 4
            empty_batch = Batch((), None, None, wait_seconds, fault=str(fault), answered=is_throttled)
            log.warning("shard %s: reading again in %.1f s: %s", self._shard, wait_seconds, fault)
            return empty_batch
        if batch is None:
            return Batch((), None, None, self._pause(idle=True), fault=NO_RESPONSE)
        self._backoff.reset()
        if not batch.behind_seconds:
            self._limit = self.max_records
        return batch

    def close(self) -> None:
        """Log the number of dropped records. The client stays open, because it belongs to the source."""
        self._dropped.log_totals()

    def _read_batch(self) -> Batch | None:
        """Return the batch of the next response, or None if the iterator is no longer valid (`_needs_new_iterator`).

        If a response cannot be parsed, no part of it counts as read, and the next read makes the same request again.
        """
        with translate_parse_errors(self._stream, self.service):
            response = self._request()
        if response is None:
            return None
        previous_state = self._iterator, self._last_read, self._skip_through, self._seen
        try:
            with translate_parse_errors(self._stream, self.service):
                return self._make_batch(response)
        except SourceUnavailable:
            self._iterator, self._last_read, self._skip_through, self._seen = previous_state
            self._reset_request()
            raise

    def _reset_request(self) -> None:
        """Reset the state of a request that a subclass keeps. The caller has already restored the iterator."""

    def _request(self) -> "GetRecordsOutputTypeDef | None":
        with translate_errors(self._stream, self.service):
            if self._iterator is None:
                self._iterator = self._new_iterator()
            try:
                response = self._timeouts.try_call("get_records", ShardIterator=self._iterator, Limit=self._limit)
                return cast("GetRecordsOutputTypeDef", response)
            except ClientError as error:
                if not self._needs_new_iterator(error):
                    raise
        self._iterator = None
        log.info("shard %s: its iterator expired; requesting a new one", self._shard)
        return None

    def _needs_new_iterator(self, error: ClientError) -> bool:
        """Return whether the request failed because of its iterator, so that a new one may help."""
        return error_code(error) == "ExpiredIteratorException"

    def _new_iterator(self) -> str:
        """Return a new iterator. If the start was trimmed, retry at the oldest record if `rewind` is set."""
        start_parameters: dict[str, Any] = {"Stream": self._stream, **self._starting_position()}
        parameters = {self.parameter_names[name]: value for name, value in start_parameters.items()}
        try:
            response = self._timeouts.try_call("get_shard_iterator", ShardId=self._shard, **parameters)
        except ClientError as error:
            self._rewind_from(error)
            return self._new_iterator()
        return cast("str", response["ShardIterator"])

    def _rewind_from(self, error: ClientError) -> None:
        """Restart at the oldest record if the start was trimmed and `rewind` is set. Otherwise raise an error."""
        # Kinesis responds with InvalidArgumentException if the sequence number no longer exists.
        is_trimmed = (
            error_code(error) == "InvalidArgumentException" and self._start.numbered and self._last_read is None
        )
        if not is_trimmed:
            raise error
        if not self._rewind:
            raise Trimmed(TRIMMED_TEXT.format(self._shard, self._stream, self._start.sequence)) from error
        trimmed_number, self._start, self._skip_through = self._start.sequence, TRIM_HORIZON, None
        log.warning("shard %s: %s no longer exists; starting at TRIM_HORIZON", self._shard, trimmed_number)

    def _starting_position(self) -> "StartingPositionTypeDef":
        if self._last_read is not None:
            return {"Type": "AFTER_SEQUENCE_NUMBER", "SequenceNumber": self._last_read}
        if self._start.numbered:
            return {"Type": "AT_SEQUENCE_NUMBER", "SequenceNumber": self._start.sequence}
        if self._start.sequence == "AT_TIMESTAMP":
            return {"Type": "AT_TIMESTAMP", "Timestamp": datetime_at_position(self._start)}
        return {"Type": "LATEST" if self._start.sequence == "LATEST" else "TRIM_HORIZON"}

    def _make_batch(self, response: "GetRecordsOutputTypeDef") -> Batch:
        rows, behind_milliseconds = convert_to_columns(response["Records"]), response.get("MillisBehindLatest") or 0
        first_number, last_number = (rows.numbers[0], rows.numbers[-1]) if rows.numbers else (None, None)
        child_shards = convert_child_shards(response.get("ChildShards", ()))
        check_shard_is_ours(self._shard, first_number, child_shards)
        unpacker = Unpacker(
            self._hash_range,
            self._skip_through,
            misplaced=self._misplaced,
            whole_aggregates=self._whole_aggregates,
            drop_counter=self._dropped,
            seen_rows=self._seen,
        )
        unpacker.unpack_rows(rows)
        self._skip_through, self._seen = unpacker.skip_through, unpacker.seen
        token = unpacker.seen.token
        if first_number is not None:
            self._log_gap(first_number)
        batch = Batch(
            records=unpacker.records,
            # Dropped records count as read. Otherwise the checkpoint could not move past dropped records at the tip.
            read_to=None if last_number is None else Position(last_number, max(unpacker.subs - 1, 0), token),
            behind_seconds=behind_milliseconds / 1000,
            wait_seconds=self._pause(
                idle=last_number is None and not behind_milliseconds, behind=behind_milliseconds > 0
            ),
            ended=not response.get("NextShardIterator"),
            children=child_shards,
            size=unpacker.size,
            in_columns=partial(import_and_call_rows_of, _COLUMNS, self._stream, self._shard),
            token=token,
            possible_duplicates=self._seen.take_possible_duplicates(),
        )
        self._iterator, self._last_read = response.get("NextShardIterator") or None, last_number or self._last_read
        return batch

    def _log_gap(self, first_number: str) -> None:
        # If the record at the checkpoint was trimmed, an AT_SEQUENCE_NUMBER iterator starts with the next record that
        # still exists.
        if self._last_read is None and self._start.numbered and int(first_number) > int(self._start.sequence):
            message = "shard %s: the record of its checkpoint, %s, was trimmed; reading continues at %s, %s"
            consequence = "and any records in between are lost"
            log.warning(message, self._shard, self._start.sequence, first_number, consequence)

    def _pause(self, *, idle: bool, behind: bool = False) -> float:
        return self._pace.next_pause(idle=idle, behind=behind)
