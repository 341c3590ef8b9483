"""The scenarios of the convergence benchmark, with the limits that the results must meet."""

from collections.abc import Callable

from attrs import evolve, frozen

from leasehold_lab.simulator.question import SimulationQuestion

Figures = dict[str, float]

STILL_CYCLES = 40.0
"""The number of cycles after balance in which only renewals may be written."""

LARGE, HUGE = 30_000, 1_000_000
"""Limits for the size of a fleet (leases times workers), to which the cost of simulating a cycle is proportional."""

FEW = ("kcl", "dotnet")
"""The rule sets that are compared in large fleets."""

ALL = ("kcl", "kcl-rust", "gist", "dotnet", "java", "python", "azure-eventhub")


@frozen
class Bar:
    """A limit. `reached` returns whether the figures of a row meet it."""

    text: str
    reached: Callable[[Figures], bool]


@frozen
class Row:
    """A scenario with its limits, and the rule sets of other libraries that are compared.

    Attributes:
        against: The name and the rules of another line, whose moves and cycles this row must not exceed.
        why: The reason if the row misses a limit.
    """

    name: str
    question: SimulationQuestion
    bars: tuple[Bar, ...] = ()
    peers: tuple[str, ...] | None = None
    against: tuple[str, str] = ("", "")
    why: str = ""

    @property
    def size(self) -> int:
        """The relative cost of simulating a cycle."""
        return self.question.leases * sum(self.question.workers)

    def seeds(self, wanted: int, peer: int) -> tuple[int, int]:
        """Return the numbers of seeds for our rules and for each peer, fewer for huge fleets, which take minutes."""
        if self.size >= HUGE:
            return min(wanted, 5), min(peer, 1)
        return wanted, peer if self.size <= LARGE else min(peer, 1)

    @property
    def peer_cycles(self) -> float:
        """The number of cycles for peers, which need up to twenty cycles if `minimal` needs two."""
        return max(self.question.cycles, 25.0) if self.size < HUGE else self.question.cycles

    @property
    def others(self) -> tuple[str, ...]:
        """The rule sets that this row is compared with."""
        if self.peers is not None:
            return self.peers
        return ALL if self.size <= LARGE else FEW


def most(figure: str, limit: float) -> Bar:
    """Return the limit that a figure must not exceed `limit`."""
    return Bar(f"{figure} <= {limit:g}", lambda figures: figures[figure] <= limit)


def moves(*, factor: float = 1.0, more: float = 1.0) -> Bar:
    """Return a limit for the moves, relative to the least possible number."""
    text = f"moves <= {f'{factor:g} x ' if factor != 1.0 else ''}minimum + {more:g}"
    return Bar(text, lambda figures: figures["moves"] <= factor * figures["moves_minimum"] + more)


ASKED = (
    "An owner that answers requests hands a lease off at its next renewal, up to 3.3 s (0.17 cycles) after the request."
    " The last newcomer starts after 0.9 cycles, requests its share a cycle later, and waits. A steal would not wait,"
    " but records without a checkpoint would be read twice. If the next owner's request stalls, the lease is taken back"
    " after 2 s, requested again immediately, and given at a later renewal."
)
UNSEEN = (
    "If two hundred workers join at the same time, one or two of them find that others have requested all four leases"
    " that they chose. No other worker sees them, so shares are computed without them, and a few leases move again one"
    " or two cycles later."
)
CROWD = (
    "A thousand newcomers choose their first lease out of two thousand within 0.6 s, and none sees the requests that"
    " are in progress, which take 5 to 50 ms. One in thirty chooses a lease that another worker has just requested, but"
    " hardly any of them finds all its alternates taken, too. With the hint, none does."
)
BOTH_COUNT = (
    "Children are created before the end of their parent is written, so that a crash between the two is harmless. For a"
    " moment both count, and a worker that reads the table then takes a lease too many, which it later hands off."
)

QUIET = Bar("then quiet", lambda figures: figures["quiet_after"] <= figures["cycles"] + 0.5)
EVEN = most("spread", 1)


def asking(leases: int, *workers: int) -> SimulationQuestion:
    """Return a question that lasts as long as `minimal` needs to balance the fleet, and a while longer.

    `_still` uses longer runs.
    """
    return SimulationQuestion(leases, workers, cycles=10.0 if leases * sum(workers) <= LARGE else 6.0)


def _scale_out(leases: int, *workers: int) -> tuple[Row, Row]:
    name = f"{leases} leases, {'+'.join(map(str, workers))}"
    question = evolve(asking(leases, *workers), kind="scale-out")
    together = evolve(question, start="together")
    return (
        Row(f"{name}, spread", question, (moves(), most("cycles", 2.2), EVEN, QUIET), why=ASKED),
        Row(f"{name}, together", together, (moves(factor=1.02, more=2), most("cycles", 3.2), EVEN, QUIET), why=UNSEEN),
    )


def _groups() -> tuple[Row, ...]:
    two = evolve(asking(500, 100, 100), kind="scale-out", grouped=True)
    even = most("off_share", 0.5)
    three = evolve(asking(1000, 50, 30, 20), kind="scale-out", grouped=True)
    return (
        Row(
            "500 leases, clusters of 100+100, spread",
            two,
            (even, most("moves", 252), most("cycles", 2.2), QUIET),
            why=ASKED,
        ),
        Row(
            "500 leases, clusters of 100+100, together",
            evolve(two, start="together"),
            (even, most("moves", 255), most("cycles", 3.2), QUIET),
        ),
        Row("1000 leases, clusters of 50+30+20, spread", three, (most("off_share", 1), QUIET), ("kcl",)),
    )


def _cold(leases: int, workers: int, crowd: str = "") -> tuple[Row, ...]:
    name, question = f"{leases} leases, {workers} cold", asking(leases, workers)
    calm = (most("moved_again_percent", 0.5), most("refused_percent", 1.2), EVEN)
    return (
        Row(f"{name}, spread", question, (*calm, most("cycles", 2.2), QUIET)),
        Row(f"{name}, together", evolve(question, start="together"), (*calm, most("cycles", 2.2), QUIET), why=crowd),
        Row(f"{name}, hint", evolve(question, hint=True), (*calm, most("cycles", 1.2), QUIET), ()),
    )


def _ends(leases: int, workers: int, going: int) -> tuple[Row, ...]:
    question = evolve(asking(leases, workers), kind="crash", going=going)
    # The limit, in cycles, is the expiry of a lease, a cycle, and the delay of reads and writes.
    owned = most("unowned_lease_cycles_max", round((10.5 + 20.05 + 2.0) / 20.05, 2))
    bars = (most("moves", 0), most("failed_writes", 0), owned, QUIET)
    name = f"{leases} leases, {workers} less {going}"
    return (
        Row(f"{name}, crash", question, bars),
        Row(f"{name}, crash, dated rows", evolve(question, dated=True), bars, FEW),
        Row(f"{name}, leave", evolve(question, kind="leave"), bars),
    )


def _lives() -> tuple[Row, ...]:
    rolling = evolve(asking(500, 50), kind="rolling", grace_seconds=40.0, gap=15.0, cycles=10)
    reshard = evolve(asking(100, 10), kind="reshard", cycles=12)
    once = Bar("owner changes per lease = 1", lambda figures: figures["changes_per_lease"] <= 1.0)
    weights = evolve(asking(1000, 50), kind="weights")
    balanced_load = Bar("max/mean <= 1.15", lambda figures: figures["load"] <= 1.15)
    few = most("moves", 80)
    return (
        Row("500 leases, 50 restarted in turn, grace", rolling, (once,), ("kcl", "dotnet")),
        Row("100 leases, 10, every shard splits", reshard, (most("moves", 0),), ("kcl", "dotnet"), why=BOTH_COUNT),
        Row("1000 leases, 50, throughputs log-normal", weights, (balanced_load, few, QUIET), ()),
    )


def _mixed() -> tuple[Row, ...]:
    """Return rows for fleets that are partly KCL, which must be no worse than the row of a fleet with only KCL."""
    question = evolve(asking(100, 10, 10), kind="scale-out", peer="kcl", cycles=25.0)
    return tuple(
        Row(
            f"100 leases, 10+10, {share:.0%} minimal, others kcl",
            evolve(question, share=share),
            (EVEN, QUIET),
            (),
            ("100 leases, 10+10, spread", "kcl"),
        )
        for share in (0.1, 0.5, 0.9)
    )


def _still() -> tuple[Row, ...]:
    """Return rows for long runs, in which only renewals may be written after balance."""
    long = STILL_CYCLES + 5
    join = evolve(asking(100, 10, 10), kind="scale-out", cycles=long)
    return (
        Row("40 cycles on: 100 leases, 10+10", join, (QUIET,), ()),
        Row("40 cycles on: 100 leases, 10 less 1", evolve(asking(100, 10), kind="crash", cycles=long), (QUIET,), ()),
        Row("40 cycles on: 100 leases, 10 cold", evolve(asking(100, 10), cycles=long), (QUIET,), ()),
        Row("40 cycles on: half kcl", evolve(join, peer="kcl"), (QUIET,), ()),
        Row("40 cycles on: clusters of 10+10", evolve(join, grouped=True), (QUIET,), ()),
        Row(
            "40 cycles on: 200 leases, 20, log-normal",
            evolve(asking(200, 20), kind="weights", cycles=long),
            (QUIET,),
            (),
        ),
    )


def _seconds() -> tuple[Row, ...]:
    def own(leases: int, *workers: int) -> SimulationQuestion:
        return evolve(asking(leases, *workers), pace="own", start="together", cycles=5.0)

    join = evolve(own(100, 10, 1), kind="scale-out")
    return (
        Row("seconds: alone, 100 leases", own(100, 1), (most("seconds", 3),), ("kcl",)),
        Row("seconds: alone, 1000 leases", own(1000, 1), (most("seconds", 3),), ("kcl",)),
        Row("seconds: 10 starters, 100 leases", own(100, 10), (most("seconds", 6),), ("kcl",)),
        Row("seconds: 60 starters, 1000 leases", own(1000, 60), (most("seconds", 6),), ("kcl",)),
        Row("seconds: 10+1, 100 leases", join, (most("seconds", 15), moves(more=0)), ("kcl",)),
        Row(
            "seconds: 50+10, 1000 leases",
            evolve(own(1000, 50, 10), kind="scale-out"),
            (most("seconds", 15), moves(more=0)),
            ("kcl",),
        ),
        Row(
            "seconds: 10+10, 100 leases",
            evolve(own(100, 10, 10), kind="scale-out"),
            (most("seconds", 15), moves(factor=1.12, more=0)),
            ("kcl",),
        ),
        Row(
            "seconds: crash of 1 of 10",
            evolve(own(100, 10), kind="crash", going=1, start="spread"),
            (most("unowned_seconds", 18),),
            ("kcl",),
        ),
        Row(
            "seconds: crash of 15 of 60",
            evolve(own(1000, 60), kind="crash", going=15, start="spread"),
            (most("unowned_seconds", 19),),
            ("kcl",),
        ),
    )


def rows() -> tuple[Row, ...]:
    """Return all rows, in the order of the table."""
    return (
        *(row for size in ((100, 10, 1), (100, 10, 10), (399, 1, 199), (1000, 50, 10)) for row in _scale_out(*size)),
        *_scale_out(1000, 100, 50),
        *_groups(),
        *_cold(100, 10),
        *_cold(100, 40),
        *_cold(1000, 100),
        *_cold(2000, 1000, CROWD),
        *_cold(10_000, 200),
        *(row for size in ((100, 10, 1), (100, 10, 5), (1000, 100, 10), (500, 200, 100)) for row in _ends(*size)),
        *_lives(),
        *_mixed(),
        *_still(),
        *_seconds(),
    )
