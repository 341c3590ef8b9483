"""Shows the demo on a terminal: the workers' shards, their read rates, the events so far, and finally the verdict."""

from collections import Counter, deque
from collections.abc import Iterator

from attrs import frozen
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from leasehold.balancer.model import Lease
from leasehold_lab.demo.stage import Stage, shorten_shard_id
from leasehold_lab.demo.story import Story
from leasehold_lab.judge.explanations import RunVerdict

COLOURS = ("cyan", "magenta", "green", "yellow")
RATE_WINDOW_SECONDS = 2.0
EARLIER = 3
NARROW_WIDTH = 84


@frozen
class OwnershipSymbols:
    """The symbols that show how a worker is related to a shard."""

    reads: str
    owns: str
    next_owner: str
    dead: str

    @property
    def legend(self) -> str:
        """A line that explains the symbols."""
        symbols_with_meanings = (
            (self.reads, "reads"),
            (self.owns, "owns, about to read"),
            (self.next_owner, "named to take over"),
        )
        return "   ".join(f"{mark} {meaning}" for mark, meaning in (*symbols_with_meanings, (self.dead, "dead")))


PRETTY = OwnershipSymbols("●", "○", "→", "✗")
PLAIN = OwnershipSymbols("R", "o", ">", "x")


def choose_symbols(encoding: str) -> OwnershipSymbols:
    """Return symbols that a terminal with this encoding can show."""
    return PRETTY if encoding.lower().startswith("utf") else PLAIN


class Screen:
    """The live display of the demo, which rich renders several times a second."""

    def __init__(self, stage: Stage, story: Story, encoding: str) -> None:
        self._stage, self._story = stage, story
        self._marks = choose_symbols(encoding)
        self._counts: deque[tuple[float, Counter[str]]] = deque([(story.elapsed_seconds, Counter())])

    def record_counts(self) -> None:
        """Record the current counts, from which the rates are computed."""
        now = self._story.elapsed_seconds
        self._counts.append((now, Counter(self._stage.handed)))
        while now - self._counts[0][0] > RATE_WINDOW_SECONDS:
            self._counts.popleft()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts of the display, from top to bottom."""
        stage, story = self._stage, self._story
        elapsed_text, chapter_text = f"  {story.elapsed_seconds:3.0f} s   ", f" {story.chapter} "
        yield Text.assemble(("leasehold demo", "bold"), elapsed_text, (chapter_text, "bold reverse"))
        yield Text()
        # The latest sentence comes first, because a small terminal shows only the top of the display.
        yield from self._render_sentences(story.sentences[-1:], "bold")
        yield self._build_table(narrow=options.max_width < NARROW_WIDTH)
        yield Text(self._marks.legend, "dim", justify="center", no_wrap=True, overflow="ellipsis")
        produced_count, delivered_count = len(story.sent), len(stage.distinct_records)
        repeated_count = sum(stage.handed.values()) - delivered_count
        undelivered_count = max(produced_count - delivered_count, 0)
        yield Text.assemble(
            (f"{produced_count:,}", "bold"), " produced   ",
            (f"{delivered_count:,}", "bold"), " delivered   ",
            (f"{undelivered_count:,}", "bold"), " on their way   ",
            (f"{repeated_count:,}", "bold"), " again",
            justify="center",
        )  # fmt: skip
        yield Text()
        yield from self._render_sentences(story.sentences[-1 - EARLIER : -1], "dim")

    def _build_table(self, *, narrow: bool) -> Table:
        stage, living_workers = self._stage, self._stage.list_living_workers()
        table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), show_footer=True)
        table.add_column("shard", footer="leases\nrecords/s\nstate", no_wrap=True, min_width=0 if narrow else 18)
        workers = sorted({"worker-1", "worker-2", "worker-3", "worker-4", *stage.workers})
        (first_time, first_counts), (last_time, last_counts) = self._counts[0], self._counts[-1]
        for index, worker in enumerate(workers):
            state = stage.workers.get(worker, "")
            lease_count = sum(lease.owner == worker and not lease.ended for lease in stage.leases)
            is_running = worker in living_workers and last_time > first_time
            records_per_second = (
                (last_counts[worker] - first_counts[worker]) / (last_time - first_time) if is_running else 0.0
            )
            style = "bold red" if state == "killed" else "dim" if worker not in living_workers else "bold"
            table.add_column(
                worker.replace("worker-", "w") if narrow else worker,
                footer=Text(f"{lease_count}\n{records_per_second:,.0f}\n{state}", style),
                justify="center",
                min_width=7,
                style=COLOURS[index % 4],
                header_style=f"bold {COLOURS[index % 4]}",
            )
        table.add_column(
            "records" if narrow else "dispatched", justify="right", footer=f"{sum(stage.handed.values()):,}"
        )
        for lease in stage.leases:
            name = shorten_shard_id(lease.shard)
            if lease.parents:
                name += f" (of {' and '.join(shorten_shard_id(parent) for parent in lease.parents)})"
            record_count = sum(len(tenure.records) for tenure in stage.reading.tenures if tenure.shard == lease.shard)
            cells = ["" if lease.ended else self._format_cell(lease, worker) for worker in workers]
            style = "dim" if lease.ended else ""
            table.add_row(f"{name} finished" if lease.ended else name, *cells, f"{record_count:,}", style=style)
        return table

    def _format_cell(self, lease: Lease, worker: str) -> str:
        if lease.next_owner == worker:
            return self._marks.next_owner
        if lease.owner != worker:
            return ""
        if worker not in self._stage.list_living_workers():
            return self._marks.dead
        return self._marks.reads if self._stage.reading.find_reader(lease.shard) == worker else self._marks.owns

    def _render_sentences(self, sentences: list[tuple[float, str]], style: str) -> Iterator[RenderableType]:
        for seconds, sentence in sentences:
            line = Table.grid(padding=(0, 1))
            line.add_row(Text(f"{seconds:5.1f} s", "dim"), Text(sentence, style))
            yield line


def format_verdict_rows(verdict: RunVerdict) -> list[tuple[str, str]]:
    """Return the rows of the verdict's table, each as a name and a value."""
    is_out_of_order = any(fault.what == "out of order" for fault in verdict.faults)
    allowed_text = f"at most {sum(change.since for change in verdict.owner_changes):,} expected"
    return [
        ("records produced", f"{verdict.produced:,}"),
        ("delivered", f"{verdict.delivered:,}"),
        ("lost", f"{verdict.lost:,}"),
        ("delivered again", f"{verdict.duplicates:,} ({allowed_text})"),
        (
            "longest time unread",
            f"{verdict.unowned_seconds_max:.1f} s (shard {shorten_shard_id(verdict.unowned_shard)})",
        ),
        ("leases moved from living workers", f"{verdict.moves} (least possible {verdict.moves_least})"),
        ("order within each key", "broken" if is_out_of_order else "kept"),
    ]


def summarize_verdict(verdict: RunVerdict) -> str:
    """Return the verdict in one sentence."""
    if verdict.ok:
        return "Nothing was lost."
    return "Laws were broken: " + "; ".join(map(str, verdict.faults)) + "."


def render_verdict(verdict: RunVerdict) -> RenderableType:
    """Return the verdict as a table, followed by a summary."""
    table = Table.grid(padding=(0, 2))
    for name, value in format_verdict_rows(verdict):
        table.add_row(name, value)
    return Group("", table, "", Text(summarize_verdict(verdict), style="bold green" if verdict.ok else "bold red"))
