"""Judges a finished run by its history alone: nothing lost, order kept, and every duplicate explained.

Rule 1: nothing here asks a stream, a table or a clock; whoever ran the fleet recorded what it needs.
Rule 2: a fault is a sentence that names what went wrong and where, never a mere False.
"""

from collections.abc import Iterable, Mapping, Sequence

from attrs import asdict, field, frozen

from adapters.history.changes import Change, changes, longest_gap
from adapters.history.moves import moves
from adapters.history.tenures import Tenure, by_shard, reading_of
from adapters.history.told import Deed, Event, Seen, Sent


@frozen
class Verdict:
    """What a run's history shows.

    produced             records the stream acknowledged
    delivered            of these, handed over at least once
    lost                 of these, never handed over
    strangers            handed over, and never acknowledged
    duplicates           handed over again, each time counted
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
    shards: int
    unowned_seconds_max: float
    unowned_shard: str
    moves: int
    moves_least: int
    owner_changes: tuple[Change, ...] = field(repr=False)
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing happened that must not."""
        return not self.faults

    def as_json(self) -> dict[str, object]:
        """Values that `json.dumps` takes."""
        return {"ok": self.ok, **asdict(self)}


def judge(
    sent: Sequence[Sent],
    events: Iterable[Event],
    *,
    deeds: Sequence[Deed] = (),
    rows: Iterable[Seen] = (),
    parents: Mapping[str, tuple[str, ...]] | None = None,
) -> Verdict:
    """The verdict on a run that is over.

    events   of each worker in its own order
    deeds    what was done meanwhile; shards should have been read up to the one called end
    rows     readings of the table, by which duplicates are measured; without any, all earlier records excuse them
    parents  of every shard the stream listed
    """
    told = list(events)
    reading = reading_of(told, deeds)
    tenures = by_shard(reading.tenures)
    numbers = {(each.key, each.sha1): each.number for each in sent}
    got = {(event.key, event.sha1) for event in told if event.event == "record"}
    handed_over = sum(event.event == "record" for event in told)
    changed = changes(tenures, rows)
    last = max((event.t for event in told), default=0.0)
    gap = longest_gap(tenures, parents or {}, min((deed.t for deed in deeds if deed.what == "end"), default=last))
    done, least = moves(tenures, deeds)
    lost = [each for each in sent if (each.key, each.sha1) not in got]
    strangers = sorted(got - numbers.keys())
    return Verdict(
        produced=len(sent),
        delivered=len(sent) - len(lost),
        lost=len(lost),
        strangers=len(strangers),
        duplicates=handed_over - len({(event.shard, event.place) for event in told if event.event == "record"}),
        shards=len(tenures),
        unowned_seconds_max=round(gap.seconds, 3) if gap else 0.0,
        unowned_shard=gap.shard if gap else "",
        moves=done,
        moves_least=least,
        owner_changes=changed,
        faults=(
            *_lost(lost),
            *_strangers(strangers),
            *_outside(reading.outside),
            *_repeated(reading.tenures),
            *_replayed(changed),
            *_out_of_order(reading.tenures, numbers),
            *_overtaken(reading.tenures, numbers),
        ),
    )


def _lost(lost: list[Sent]) -> tuple[str, ...]:
    if not lost:
        return ()
    return (f"lost: {len(lost)} records were never handed over, the first is number {lost[0].number} of {lost[0].key}",)


def _strangers(strangers: list[tuple[str, str]]) -> tuple[str, ...]:
    if not strangers:
        return ()
    return (f"stranger: {len(strangers)} records were handed over and never sent, one of them of {strangers[0][0]}",)


def _outside(outside: list[Event]) -> tuple[str, ...]:
    if not outside:
        return ()
    first = outside[0]
    return (f"outside: {first.worker} handed over {len(outside)} records while not reading, as of {first.shard}",)


def _repeated(tenures: Iterable[Tenure]) -> tuple[str, ...]:
    """Within one tenure nothing changes hands, so nothing explains a duplicate."""
    return tuple(
        f"repeated: {tenure.worker} handed over {again} records of {tenure.shard} twice without a change of owner"
        for tenure in tenures
        if (again := len(tenure.records) - len({record.place for record in tenure.records}))
    )


def _replayed(changed: Iterable[Change]) -> tuple[str, ...]:
    return tuple(
        f"replayed: {change.after} handed over {change.replayed} records of {change.shard} again "
        f"that {change.before} or another had checkpointed"
        for change in changed
        if change.replayed
    )


def _out_of_order(tenures: Iterable[Tenure], numbers: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    return tuple(fault for tenure in tenures for fault in _first_disorder(tenure, numbers))


def _first_disorder(tenure: Tenure, numbers: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    reached: dict[str, int] = {}
    for record in tenure.records:
        number = numbers.get((record.key, record.sha1))
        if number is None:
            continue  # a stranger, named elsewhere
        if number < reached.get(record.key, number):
            after = f"after number {reached[record.key]}, both of {tenure.shard}"
            return (f"order: {tenure.worker} handed over number {number} of {record.key} {after}",)
        reached[record.key] = number
    return ()


def _overtaken(tenures: Iterable[Tenure], numbers: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """Across all owners and shards, no record may come before an earlier one of its key has come once."""
    first: dict[tuple[str, int], float] = {}
    for tenure in tenures:
        for record in tenure.records:
            number = numbers.get((record.key, record.sha1))
            if number is not None:
                place = (record.key, number)
                first[place] = min(first.get(place, record.t), record.t)
    reached: dict[str, tuple[float, int]] = {}
    for (key, number), t in sorted(first.items()):
        latest = reached.get(key, (t, number))
        if t < latest[0]:
            return (f"order: number {number} of {key} was handed over before number {latest[1]}, on another shard",)
        reached[key] = (t, number)
    return ()
