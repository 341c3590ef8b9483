"""The report as one page of HTML that needs nothing else: no network, no scripts."""

from collections.abc import Sequence
from itertools import cycle

from markupsafe import Markup

from leasehold.adapters.report.changes import CheckpointLag, SnapshotChange
from leasehold.adapters.report.charts import BAD, COLOURS, Bar, Line, bars, lines, stacks
from leasehold.adapters.report.distribution import NUMBER, Distribution, GroupShare, Share
from leasehold.adapters.report.report import HOT, Moment, Report
from leasehold.adapters.report.templates import TEMPLATES, count, group_name
from leasehold.balancer.rules.groups import Groups, path_of

BARS_MAX = 40
"""More bars than this are shown by their ends: the fullest and the emptiest half as many each."""

UNEVEN_MAX = 3
"""How many of the groups farthest from an even share are named, on each level."""

_PROGRESS = {NUMBER: "at a sequence number", "SHARD_END": "finished (SHARD_END)"}


def page(said: Report, groups: Groups) -> str:
    """The page; names in it are text, whatever they look like."""
    return TEMPLATES.get_template("page.html.j2").render(
        said=said,
        last=said.last,
        findings=findings(said),
        charts=_charts(said, groups),
        ends=len(said.last.workers) > BARS_MAX,
        half=BARS_MAX // 2,
        owner_changes=sum(change.owner_changes for change in said.changes),
    )


def findings(said: Report) -> tuple[str, ...]:
    """The findings that need attention, one sentence each; none where all is even."""
    last = said.last
    found = []
    if said.malformed:
        found.append(f"{said.malformed} rows cannot be read as leases; `leasehold leases` names them.")
    if last.unowned:
        have, it = ("has", "it") if last.unowned == 1 else ("have", "them")
        found.append(
            f"{last.unowned} of {last.working} unfinished leases {have} no owner: nobody reads what is in {it}."
        )
    if last.spread.width > 1:
        found.append(
            f"Workers hold between {last.spread.least} and {last.spread.most} leases; even would differ by one."
        )
    for level in last.levels:
        found += _uneven(level)
    if said.least:
        found.append(f"{said.least} {'move' if said.least == 1 else 'moves'} would make it even, and no fewer.")
    if hot := [line.key for line in said.leases if line.hot]:
        found.append(f"Hot: {', '.join(hot[:UNEVEN_MAX])} carry more than {HOT:g} times the mean throughput.")
    return tuple(found)


def _uneven(level: Sequence[GroupShare]) -> list[str]:
    """Groups apart by more than one lease that an even split, by numbers of workers, would not leave."""
    leases, workers = sum(each.leases for each in level), sum(each.workers for each in level)
    shares = {each.path: leases * each.workers / workers for each in level} if workers else {}
    apart = [each for each in level if len(level) > 1 and abs(each.leases - shares[each.path]) > 1]
    farthest = sorted(apart, key=lambda each: -abs(each.leases - shares[each.path]))[:UNEVEN_MAX]
    return [
        f"Group {group_name(each.path)} holds {each.leases} leases; its {each.workers} of {workers} workers"
        f" would evenly hold {count(shares[each.path])}."
        for each in farthest
    ]


def _charts(said: Report, groups: Groups) -> dict[str, Markup]:
    drawn = {"workers": _workers(said.last, groups), "held": _held(said.last, groups), "progress": _progress(said.last)}
    drawn |= {f"level{depth}": _level(said.last, depth) for depth in range(len(said.last.levels))}
    if said.changes:
        times = [moment.at - said.moments[0].at for moment in said.moments]
        drawn |= {"spread": _spreads(times, said.moments), "churn": _churn(times[1:], said.changes)}
    if len(said.lags) > 1:
        drawn["lag"] = _behind(said, said.lags)
    elif said.stood and not said.lags:
        drawn["stood"] = _behind(said, said.stood)
    # The charts escape the names in them.
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704


def _behind(said: Report, lags: Sequence[CheckpointLag]) -> str:
    since = [lag.at - said.moments[0].at for lag in lags]
    most = Line("longest", tuple(lag.most for lag in lags), COLOURS[1])
    return lines(since, (most, Line("median", tuple(lag.median for lag in lags), COLOURS[0])), "seconds")


def _ends(rows: Sequence[Bar]) -> Sequence[Bar]:
    if len(rows) <= BARS_MAX:
        return rows
    ordered = sorted(rows, key=lambda row: (-row.length, row.label))
    return ordered[: BARS_MAX // 2] + ordered[-BARS_MAX // 2 :]


def _hues(last: Distribution) -> dict[tuple[str, ...], str]:
    """A colour for each outermost group, in turn."""
    outermost = last.levels[0] if last.levels else ()
    return dict(zip((each.path for each in outermost), cycle(COLOURS), strict=False))


def _nobody(last: Distribution) -> list[Bar]:
    return [Bar("nobody", last.unowned, BAD)] if last.unowned else []


def _level(last: Distribution, depth: int) -> str:
    hues = _hues(last)
    rows = [Bar(group_name(each.path), each.leases, hues[each.path[:1]]) for each in last.levels[depth]]
    return bars([*_ends(rows), *_nobody(last)])


def _workers(last: Distribution, groups: Groups) -> str:
    hues = _hues(last)
    rows = [Bar(each.worker, each.leases, _hue(hues, each, groups)) for each in last.workers]
    return bars([*_ends(rows), *_nobody(last)])


def _hue(hues: dict[tuple[str, ...], str], share: Share, groups: Groups) -> str:
    return hues.get(path_of(share.worker, groups)[:1], COLOURS[0])


def _held(last: Distribution, groups: Groups) -> str:
    """How many workers hold how many leases, by outermost group."""
    places = range(last.spread.least, last.spread.most + 1)
    colours = _hues(last) or {(): COLOURS[0]}
    # With more groups than colours, colours would not tell the groups apart.
    named = list(colours) if len(colours) <= len(COLOURS) else []
    counts = {path: dict.fromkeys(places, 0) for path in named or [()]}
    for share in last.workers:
        counts[path_of(share.worker, groups)[:1] if named else ()][share.leases] += 1
    layers = [
        Line(group_name(path) or "workers", tuple(held.values()), colours.get(path, COLOURS[0]))
        for path, held in counts.items()
    ]
    return stacks(places, layers, "leases held", "workers")


def _progress(last: Distribution) -> str:
    colours = {"SHARD_END": COLOURS[2], NUMBER: COLOURS[0]}
    return bars([Bar(_PROGRESS.get(name, name), count, colours.get(name, COLOURS[3])) for name, count in last.progress])


def _spreads(times: Sequence[float], moments: Sequence[Moment]) -> str:
    spreads = [moment.distribution.spread for moment in moments]
    rows = (
        Line("most", tuple(spread.most for spread in spreads), COLOURS[1]),
        Line("mean", tuple(spread.mean for spread in spreads), COLOURS[0]),
        Line("least", tuple(spread.least for spread in spreads), COLOURS[2]),
        Line("without an owner", tuple(moment.distribution.unowned for moment in moments), BAD),
    )
    return lines(times, rows, "leases")


def _churn(times: Sequence[float], changed: Sequence[SnapshotChange]) -> str:
    rows = (
        Line("moved", tuple(change.moved for change in changed), COLOURS[1]),
        Line("claimed", tuple(change.claimed for change in changed), COLOURS[0]),
        Line("freed", tuple(change.freed for change in changed), BAD),
    )
    return lines(times, rows, "leases")
