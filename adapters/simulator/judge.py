"""Judges a simulated run by its history alone, and explains what must not be.

Rule 1: nothing here asks a table, a worker or a clock. Rule 2: a breach says what, when and why.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import frozen

from adapters.simulator.ledger import alive_at, least_moves, lives, owners_at, unowned
from adapters.simulator.outcome import QUIET_VERBS
from adapters.simulator.told import History, Wrote
from balancer.groups import Groups

What = Literal[
    "two holders",
    "counter",
    "checkpoint went back",
    "held by nobody",
    "action at balance",
    "uneven",
    "needless move",
    "lost",
    "out of order",
    "handed over again",
    "handed over unheld",
]

NOTICE_SECONDS = 6.0
"""How long after its right to a lease is over a worker may need to stop: requests under way stall, batches end."""

CLOCK_RATE = 0.999
"""How much slower a worker's clock may run than another's."""

FIRST_RECORD = 100


@frozen
class Limits:
    """What a run is held to.

    lease_seconds  by worker: how long its lease stands still before others may take it
    settled        as of when nothing but renewals may be written, and everything must be held, all evenly
    even           whether workers that plan may not differ by more than one lease from any other
    moves          as of when, and how many more than the least; None: not judged
    groups         how workers form groups
    """

    lease_seconds: Mapping[str, float]
    settled: float
    even: bool = True
    moves: tuple[float, int] | None = None
    groups: Groups = None


@frozen
class Breach:
    """What must not be."""

    what: What
    t: float
    why: str

    def __str__(self) -> str:
        return f"{self.what} at {self.t:.3f} s: {self.why}"


def judge(history: History, limits: Limits) -> tuple[Breach, ...]:
    """Every breach, in order of time; none for a good run."""
    breaches = (
        *_written(history, limits),
        *_handed(history, limits),
        *_unread(history, limits),
        *_abandoned(history, limits),
        *_restless(history, limits),
        *_uneven(history, limits),
        *_needless(history, limits),
    )
    return tuple(sorted(breaches, key=lambda breach: breach.t))


# What was written


def _written(history: History, limits: Limits) -> Iterator[Breach]:
    last: dict[str, Wrote] = {}
    for write in history.writes:
        if not write.done or write.before is None or write.after is None or write.verb == "delete":
            continue
        yield from _two_holders(write, last.get(write.key), history, limits)
        yield from _counter(write)
        if write.after.checkpoint.order < write.before.checkpoint.order:
            back = f"{write.before.checkpoint.sequence} became {write.after.checkpoint.sequence}"
            yield Breach("checkpoint went back", write.t, f"of {write.key}: {back}, written by {write.process}")
        if write.verb not in {"request", "withdraw", "annotate", "checkpoint-late"}:
            last[write.key] = write


def _two_holders(write: Wrote, last: Wrote | None, history: History, limits: Limits) -> Iterator[Breach]:
    """Only a claim says that nobody holds it: a thief knows better, and a gift is no surprise."""
    before = write.before.owner if write.before else None
    if (
        write.verb not in {"claim", "release"}
        or last is None
        or before in {None, write.worker}
        or last.worker != before
    ):
        return
    until = last.sent + CLOCK_RATE * limits.lease_seconds.get(before or "", 0.0)
    running = any(life.process == last.process and life.end > write.t for life in lives(history.deeds))
    if running and write.t < until:
        why = f"{write.process} claimed {write.key}, which {last.process} held until {until:.3f} by its {last.verb}"
        yield Breach("two holders", write.t, f"{why} of {last.sent:.3f}")


def _counter(write: Wrote) -> Iterator[Breach]:
    before, after = write.before, write.after
    if before is None or after is None or before.owner == after.owner or after.epoch == before.epoch + 1:
        return
    change = f"from {before.epoch} to {after.epoch}"
    yield Breach("counter", write.t, f"{write.key} passed to {after.owner} and its counter went {change}, not by one")


# What was handed over


def _handed(history: History, limits: Limits) -> Iterator[Breach]:
    holds = _Holds(history, limits)
    reached: dict[str, int] = {}
    for batch in history.handed:
        worker = batch.process.rpartition("#")[0]
        yield from holds.check(batch.t, worker, batch.process, batch.shard, batch.first)
        expected = reached.get(batch.shard, FIRST_RECORD - 1) + 1
        if batch.first > expected:
            why = f"{batch.process} handed over {batch.first} of {batch.shard}, and nobody {expected}"
            yield Breach("lost", batch.t, why)
        for parent in history.parents.get(batch.shard, ()):
            if reached.get(parent, FIRST_RECORD - 1) < FIRST_RECORD - 1 + history.produced.get(parent, 0):
                why = f"{batch.process} handed over {batch.first} of {batch.shard} before the end of {parent}"
                yield Breach("out of order", batch.t, why)
        reached[batch.shard] = max(reached.get(batch.shard, 0), batch.last)


class _Holds:
    """Walks along the writes, and tells what each process had a right to when it handed something over."""

    def __init__(self, history: History, limits: Limits) -> None:
        self._writes = iter([*history.writes])
        self._next = next(self._writes, None)
        self._limits = limits
        self._rights: dict[tuple[str, str], tuple[float, int]] = {}
        self._owners = {row.key: row.owner for row in history.first}
        self._naps = [(deed.subject, deed.t, deed.t + deed.seconds) for deed in history.deeds if deed.what == "nap"]

    def check(self, t: float, worker: str, process: str, shard: str, first: int) -> Iterator[Breach]:
        """One batch, handed over then."""
        while self._next is not None and self._next.t <= t:
            self._learn(self._next)
            self._next = next(self._writes, None)
        until, checkpoint = self._rights.get((process, shard), (0.0, 0))
        asleep = any(who == process and begin <= t and end > t - NOTICE_SECONDS for who, begin, end in self._naps)
        if self._owners.get(shard) != worker and t > until + NOTICE_SECONDS and not asleep:
            held = f"held until {until:.3f}" if until else "never held"
            why = f"{process} handed over {first} of {shard}, which it {held}"
            yield Breach("handed over unheld", t, f"{why}; its owner is {self._owners.get(shard)}")
        if first <= checkpoint:
            why = f"{process} handed over {first} of {shard} and took it when {checkpoint} was checkpointed"
            yield Breach("handed over again", t, why)

    def _learn(self, write: Wrote) -> None:
        if not write.done or write.after is None:
            return
        self._owners[write.key] = None if write.verb == "delete" else write.after.owner
        if write.after.owner != write.worker:
            return
        before = self._rights.get((write.process, write.key))
        until = write.sent + self._limits.lease_seconds.get(write.worker, 0.0)
        took = write.verb in {"claim", "steal", "accept", "take-back", "create"} or before is None
        sequence = write.after.checkpoint
        checkpoint = int(sequence.sequence) if sequence.numbered else 0
        self._rights[write.process, write.key] = (until, checkpoint if took or before is None else before[1])


def _unread(history: History, limits: Limits) -> Iterator[Breach]:
    if not _planners(history, limits.settled):
        return
    reached: Counter[str] = Counter()
    for batch in history.handed:
        reached[batch.shard] = max(reached[batch.shard], batch.last)
    for shard, count in history.produced.items():
        if count and reached[shard] < FIRST_RECORD - 1 + count:
            why = f"of {shard} nobody handed over {max(reached[shard] + 1, FIRST_RECORD)} to {FIRST_RECORD - 1 + count}"
            yield Breach("lost", history.end, why)


# Where it came to rest


def _planners(history: History, t: float) -> frozenset[str]:
    """The workers that run then and plan: without one nothing can be asked of a fleet."""
    zombies = {deed.subject.rpartition("#")[0] for deed in history.deeds if deed.what == "zombie"}
    return alive_at(lives(history.deeds), t) - zombies


def _abandoned(history: History, limits: Limits) -> Iterator[Breach]:
    if not _planners(history, limits.settled):
        return
    for key, seconds in unowned(history, history.end, limits.settled).items():
        if seconds > 0.0:
            why = f"{key} had no living owner for {seconds:.3f} s, when everybody had long been left in peace"
            yield Breach("held by nobody", history.end, why)


def _restless(history: History, limits: Limits) -> Iterator[Breach]:
    for write in history.writes:
        # What has ended is cleared away whenever somebody lists the shards.
        cleared = write.verb == "delete" and write.before is not None and write.before.ended
        if write.t > limits.settled and write.verb not in QUIET_VERBS and not cleared:
            owner = write.before.owner if write.before else None
            why = (
                f"{write.process} wrote a {write.verb} of {write.key} ({owner}), {'done' if write.done else 'refused'}"
            )
            yield Breach("action at balance", write.t, why)


def _uneven(history: History, limits: Limits) -> Iterator[Breach]:
    workers, planners = alive_at(lives(history.deeds), history.end - 1e-9), _planners(history, limits.settled)
    if not (limits.even and planners):
        return
    held = Counter(owner for owner in owners_at(history, history.end).values() if owner is not None)
    most = max(workers, key=lambda worker: (held[worker], worker))
    least = min(planners, key=lambda worker: (held[worker], worker))
    if held[most] - held[least] > 1:
        yield Breach("uneven", history.end, f"{most} holds {held[most]} leases, and {least} {held[least]}")


def _needless(history: History, limits: Limits) -> Iterator[Breach]:
    """Which moves were needed nobody can say; that there were too many can be said of the last."""
    if limits.moves is None:
        return
    since, more = limits.moves
    all_lives = lives(history.deeds)
    workers = alive_at(all_lives, history.end - 1e-9)
    least = least_moves(owners_at(history, since), workers, limits.groups)
    moved = [
        write
        for write in history.writes
        if write.t >= since
        and write.done
        and write.before is not None
        and write.after is not None
        and write.before.owner != write.after.owner
        and write.before.owner in alive_at(all_lives, write.t)
        and not write.after.ended
    ]
    for place, write in enumerate(moved[least + more :], least + more + 1):
        owners = f"{write.before.owner if write.before else None} to {write.after.owner if write.after else None}"
        yield Breach(
            "needless move", write.t, f"{write.key} from {owners} is move {place}, and {least} would have done"
        )
