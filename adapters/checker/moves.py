"""Every write of a planned move lost, unanswered, or its process's last, alone and in pairs: the real worker answers.

`python -m adapters.checker.moves` tries all of it, on all cores, and prints what must not be. The fleets of `cases`
show what the rules decide under every interleaving; this shows that what carries them out loses and repeats nothing.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Annotated, get_args

import typer
from attrs import frozen
from rich.console import Console
from rich.progress import track

from adapters.simulator.judge import Limits, judge
from adapters.simulator.run import run
from adapters.simulator.scenario import Blow, Member, Network, Scenario
from adapters.simulator.told import History
from balancer.config import Config
from balancer.model import TRIM_HORIZON

GIVER, TAKER = "a-0", "b-0"
CALM, SETTLED, SECONDS = 30.0, 110.0, 130.0
STARTS = (3.0, 4.1, 5.2, 6.3, 7.4)
"""When the taker joins: in other places of the giver's rounds."""

app = typer.Typer(add_completion=False)

Plot = tuple[tuple[int, Blow], ...]


@frozen
class Story:
    """A giver of two leases, a taker of one that starts then, and what befalls their writes."""

    starts: float
    plot: Plot = ()

    def told(self) -> History:
        """Run it."""
        config = Config(initial_position=TRIM_HORIZON)
        members = (Member(GIVER, config), Member(TAKER, config, starts=self.starts))
        network = Network(stall=0.0, unanswered=0.0, plot=self.plot)
        owners = (GIVER, GIVER)
        return run(Scenario(1, owners, members, SECONDS, calm=CALM, network=network, reading=True, full=True))


def breaches(story: Story) -> tuple[str, ...]:
    """What must not be and was; without a death nothing is handed over twice, either."""
    history = story.told()
    limits = Limits(dict.fromkeys((GIVER, TAKER), Config().lease_seconds), SETTLED)
    wrong = [str(breach) for breach in judge(history, limits)]
    if not any(deed.what == "crash" for deed in history.deeds):
        spans = ((batch.shard, range(batch.first, batch.last + 1)) for batch in history.handed)
        handed = Counter((shard, number) for shard, numbers in spans for number in numbers)
        wrong += [f"{number} of {shard} handed over {n} times" for (shard, number), n in handed.items() if n > 1]
    return tuple(wrong)


def window(history: History) -> range:
    """The numbers of the writes from the request for the move to a little after it."""
    asked = min(write.sent for write in history.writes if write.verb == "request")
    moved = max(
        write.t for write in history.writes if write.before and write.after and write.before.owner != write.after.owner
    )
    inside = [number for number, sent in enumerate(history.sent) if asked <= sent <= moved + 3.0]
    return range(inside[0], inside[-1] + 1)


def alone(starts: Iterable[float] = STARTS) -> Iterator[Story]:
    """One blow to each write."""
    for start in starts:
        for number, blow in product(window(Story(start).told()), get_args(Blow)):
            yield Story(start, ((number, blow),))


def pairs(starts: Iterable[float] = STARTS) -> Iterator[Story]:
    """Two blows, the second to any later write of a move that is longer for the first."""
    for start in starts:
        numbers = window(Story(start).told())
        late = range(numbers.start, numbers.stop + len(numbers))
        for first, second in product(product(numbers, get_args(Blow)), product(late, get_args(Blow))):
            if first[0] < second[0]:
                yield Story(start, (first, second))


@app.command()
def main(*, jobs: Annotated[int, typer.Option(min=1, help="Stories told at a time.")] = os.cpu_count() or 1) -> None:
    """Try one blow in every place of the giver's rounds, and two in some; exit 1 if anything is not as it must be."""
    logging.disable(logging.CRITICAL)  # each blow would be told by whom it hits
    stories = [*alone(), *pairs(STARTS[:2])]
    with ProcessPoolExecutor(jobs) as pool:
        told = zip(stories, track(pool.map(breaches, stories, chunksize=50), "moves", len(stories)), strict=True)
        found = [f"{story}: {'; '.join(wrong)}" for story, wrong in told if wrong]
    Console().print(*found, f"{len(stories)} stories, {len(found)} with something wrong", sep="\n")
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    app()
