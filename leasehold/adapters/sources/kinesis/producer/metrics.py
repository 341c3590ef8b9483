"""The counts of a producer, under the names that the KPL gave them."""

from collections import Counter
from collections.abc import Iterable

from attrs import define, field

from leasehold.adapters.sources.kinesis.producer.shard_queue import Unit


@define
class ProducerMetrics:
    """Plain counters; `named` says what each is.

    Seconds are sums: over user records for `buffered_seconds`, over requests for `request_seconds`.
    """

    received: int = 0
    put: int = 0
    put_bytes: int = 0
    units_put: int = 0
    units_put_bytes: int = 0
    units_sent: int = 0
    requests: int = 0
    request_seconds: float = 0.0
    buffered_seconds: float = 0.0
    retries: int = 0
    late: int = 0
    unknown: int = 0
    misplaced: int = 0
    errors: Counter[str] = field(factory=Counter)

    def sent(self, units: Iterable[Unit], now: float) -> None:
        """A request left."""
        self.requests += 1
        for unit in units:
            self.units_sent += 1
            self.buffered_seconds += sum(now - entry.arrived for entry in unit.entries)

    def accepted(self, unit: Unit) -> None:
        """A unit is where it belongs."""
        self.put += len(unit.entries)
        self.put_bytes += sum(len(entry.data) for entry in unit.entries)
        self.units_put += 1
        self.units_put_bytes += len(unit.data)

    def refused(self, unit: Unit, code: str) -> None:
        """A unit must be sent again."""
        self.errors[code] += 1
        self.retries += len(unit.entries)

    def named(self) -> dict[str, float | dict[str, int]]:
        """By the KPL's names; times are means in milliseconds.

        Ours are the last two: user records of requests that got no answer (only these can be in the
        stream twice), and Kinesis records that were sent again since they landed on a wrong shard.
        """
        return {
            "UserRecordsReceived": self.received,
            "UserRecordsPending": self.received - self.put - self.late,
            "UserRecordsPut": self.put,
            "UserRecordsDataPut": self.put_bytes,
            "KinesisRecordsPut": self.units_put,
            "KinesisRecordsDataPut": self.units_put_bytes,
            "ErrorsByCode": dict(self.errors),
            "AllErrors": self.errors.total(),
            "RetriesPerRecord": _share(self.retries, self.put),
            "BufferingTime": 1000 * _share(self.buffered_seconds, self.put),
            "RequestTime": 1000 * _share(self.request_seconds, self.requests),
            "UserRecordsPerKinesisRecord": _share(self.put, self.units_put),
            "KinesisRecordsPerPutRecordsRequest": _share(self.units_sent, self.requests),
            "UserRecordExpired": self.late,
            "UserRecordsOutcomeUnknown": self.unknown,
            "KinesisRecordsMisplaced": self.misplaced,
        }


def _share(whole: float, parts: int) -> float:
    return whole / parts if parts else 0.0
