"""The laws of writes as their processes saw them, beside the hand-overs: what no two answers of one table can say.

A write took effect between the moments when it was sent and answered, so only a write that was sent after another's
answer is known to be the later one. Law 1: no two processes are told of one version of a lease that their write made
it. Law 2: its counter never falls. Law 3: who takes a lease, or checkpoints it, is told of no checkpoint before one
that was answered already. Law 4: a worker checkpoints nothing after another has taken the lease from it. Law 5: a
process hands over only for as long as the last write it sent keeps the lease. Law 6: only what has expired by its
owner's own clock is claimed. A lease that was deleted is judged no more: whoever makes it anew begins at its first
version.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from leasehold.adapters.history.breach import Breach, BreachKind, Limits
from leasehold.adapters.history.changes import TAKES
from leasehold.adapters.history.events import RunHistory, WriteAnswer, WriteVerb
from leasehold.adapters.history.lives import Life, lives
from leasehold.adapters.history.rights import CLOCK_RATE

VERSIONLESS: frozenset[WriteVerb] = frozenset({"request", "withdraw", "annotate", "checkpoint-late", "delete"})
"""The writes that leave the version alone, at least in some layouts."""

MOVES: frozenset[WriteVerb] = frozenset({"checkpoint", "checkpoint-late", "give"})
"""The writes that move a checkpoint."""

KEEPS: frozenset[WriteVerb] = TAKES | {"renew", "checkpoint"}
"""The writes after which their writer holds the lease."""


def answer_breaches(history: RunHistory, limits: Limits) -> Iterator[Breach]:
    """The breaches of these laws."""
    by_shard: dict[str, list[WriteAnswer]] = defaultdict(list)
    all_lives = lives(history.incidents)
    for each in sorted(history.answers, key=lambda each: each.sent):
        by_shard[each.shard].append(each)
    for shard, written in by_shard.items():
        deleted = min((each.sent for each in written if each.verb == "delete"), default=math.inf)
        answers = [each for each in written if each.t < deleted]
        yield from _one_version(shard, answers)
        done = [each for each in answers if each.done]
        yield from _falls("counter", done, done, lambda each: each.epoch)
        moved = [each for each in done if each.verb in MOVES]
        placed = [each for each in done if each.verb in TAKES | MOVES - {"checkpoint-late"}]
        yield from _falls("checkpoint went back", moved, placed, lambda each: each.checkpoint)
        if limits.owned_checkpoints:
            yield from _of_another(shard, answers)
        yield from _claimed_early(shard, done, all_lives, limits)
    if history.answers and limits.lease_seconds:
        yield from _unheld(history, by_shard, limits)


def _one_version(shard: str, answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    made: dict[str, WriteAnswer] = {}
    for each in answers:
        if each.done and each.version and each.verb not in VERSIONLESS:
            other = made.setdefault(each.version, each)
            if other.process != each.process:
                told = f"{each.process} by a {each.verb} and {other.process} by a {other.verb}"
                yield Breach("two holders", each.t, f"{told} were both told that they made {shard} {each.version}")
                return


def _falls(
    what: BreachKind, before: Sequence[WriteAnswer], after: Sequence[WriteAnswer], value: Callable[[WriteAnswer], Any]
) -> Iterator[Breach]:
    """Walk along the answers that came before each of `after`, which are in the order of their sending, was sent."""
    waiting = sorted(before, key=lambda each: each.t, reverse=True)
    highest: WriteAnswer | None = None
    for each in after:
        while waiting and waiting[-1].t < each.sent:
            came = waiting.pop()
            highest = came if highest is None else max(highest, came, key=value)
        if highest is not None and value(each) < value(highest):
            fell = f"of {each.shard}: {value(highest)} was answered to {highest.process}"
            why = f"{fell}, and {value(each)} to the later {each.verb} of {each.process}"
            yield Breach(what, each.t, why)
            return


def _of_another(shard: str, answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    takes = [each for each in answers if each.verb in TAKES]
    for each in answers:
        if not each.done or each.verb not in {"checkpoint", "give"}:
            continue
        own = [take for take in takes if take.worker == each.worker and take.sent < each.t]
        # A taking without an answer may have taken effect at any time since.
        since = max((take.t if take.done else math.inf for take in own if take.outcome != "lost"), default=-math.inf)
        between = [
            take
            for take in takes
            if take.done and take.worker != each.worker and take.sent > since and take.t < each.sent
        ]
        if between:
            took = f"{between[0].process} had taken it {each.sent - between[0].t:.3f} s before"
            why = f"{each.process} wrote a {each.verb} of {shard}, and {took}"
            yield Breach("checkpoint of another", each.t, why)
            return


def _claimed_early(
    shard: str, done: Sequence[WriteAnswer], all_lives: Sequence[Life], limits: Limits
) -> Iterator[Breach]:
    """Judge claims alone: a thief knows that the lease is held. Who saw the owner's last write waits from then on."""
    for each in done:
        if each.verb != "claim" or each.seen in {None, each.worker}:
            continue
        kept = [of for of in done if of.worker == each.seen and of.verb in KEEPS and of.t < each.sent]
        last = kept[-1] if kept else None
        if last is None or not any(life.process == last.process and life.end > each.t for life in all_lives):
            continue
        until = last.sent + CLOCK_RATE * limits.lease_seconds.get(last.worker, 0.0)
        if each.sent < until:
            why = f"{each.process} claimed {shard}, which {last.process} held for {until - each.sent:.3f} s more"
            yield Breach("two holders", each.t, f"{why} by its {last.verb}")
            return


def _unheld(history: RunHistory, by_shard: Mapping[str, Sequence[WriteAnswer]], limits: Limits) -> Iterator[Breach]:
    kept: dict[tuple[str, str], list[float]] = defaultdict(list)
    for shard, answers in by_shard.items():
        for each in answers:
            if each.outcome != "lost" and each.verb in KEEPS:
                kept[each.process, shard].append(each.sent)
    naps = [(nap.subject, nap.t, nap.t + nap.seconds) for nap in history.incidents if nap.what == "nap"]
    told: set[tuple[str, str]] = set()
    for record in history.told("record"):
        place = record.process, record.shard
        times = kept[place]
        last = times[found - 1] if (found := bisect_right(times, record.t)) else -math.inf
        until = last + limits.lease_seconds.get(record.worker, math.inf) + limits.notice_seconds
        asleep = any(
            who in {record.process, record.worker} and begin <= record.t and end > until - limits.notice_seconds
            for who, begin, end in naps
        )
        if record.t > until and not asleep and place not in told:
            told.add(place)
            wrote = f"wrote {record.t - last:.3f} s before for the last time" if times else "never wrote"
            why = f"{record.process} handed over {record.place[0]} of {record.shard}, and {wrote} of the lease"
            yield Breach("handed over unheld", record.t, why)
