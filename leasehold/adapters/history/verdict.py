"""The verdict on a finished run for people and programs: its figures, and every breach."""

from attrs import asdict, field, frozen

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.changes import ReaderChange, reader_changes
from leasehold.adapters.history.events import RunHistory
from leasehold.adapters.history.judge import judge
from leasehold.adapters.history.moves import moves
from leasehold.adapters.history.ownership import longest_unowned, read_spans
from leasehold.adapters.history.records import behind_a_later_token, lost, strangers
from leasehold.adapters.history.tenures import by_shard, reading_of

UNLIMITED = Limits()


@frozen
class RunVerdict:
    """The findings on a run's history.

    produced             records the stream acknowledged
    delivered            of these, handed over at least once
    lost                 of these, never handed over
    strangers            handed over, and never acknowledged
    duplicates           handed over again, each time counted
    fenced               handed over under a lower token than one before: whoever compares tokens refuses them
    owner_changes        what each change of a shard's reader cost
    unowned_seconds_max  the longest time nobody read a shard
    moves, moves_least   leases that left a living worker, and how few would have done
    faults               what must not be; empty for a good run
    """

    produced: int
    delivered: int
    lost: int
    strangers: int
    duplicates: int
    fenced: int
    shards: int
    unowned_seconds_max: float
    unowned_shard: str
    moves: int
    moves_least: int
    owner_changes: tuple[ReaderChange, ...] = field(repr=False)
    faults: tuple[Breach, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing happened that must not."""
        return not self.faults

    def as_json(self) -> dict[str, object]:
        """Values that `json.dumps` takes; times are milliseconds, as in the lines of events."""
        told = [{**asdict(change), "t": round(change.t * 1000)} for change in self.owner_changes]
        return {"ok": self.ok, **asdict(self), "owner_changes": told, "faults": [str(each) for each in self.faults]}


def verdict_on(history: RunHistory, limits: Limits = UNLIMITED) -> RunVerdict:
    """The verdict on a run that is over; shards should have been read up to the incident called end."""
    tenures = by_shard(reading_of(history).tenures)
    records = list(history.told("record"))
    end = min((each.t for each in history.incidents if each.what == "end"), default=history.end)
    unread = longest_unowned(read_spans(tenures, history.parents), 0.0, end)
    shard, seconds = max(unread.items(), key=lambda gap: (gap[1], gap[0]), default=("", 0.0))
    done, least = moves(history, tenures)
    missing = len(lost(history))
    return RunVerdict(
        produced=len(history.sent),
        delivered=len(history.sent) - missing,
        lost=missing,
        strangers=len(strangers(history)),
        duplicates=len(records) - len({(event.shard, event.place) for event in records}),
        fenced=behind_a_later_token(history),
        shards=len(tenures),
        unowned_seconds_max=round(seconds, 3),
        unowned_shard=shard if seconds else "",
        moves=done,
        moves_least=least,
        owner_changes=reader_changes(history, tenures),
        faults=judge(history, limits),
    )
