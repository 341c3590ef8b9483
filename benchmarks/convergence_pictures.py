"""Draws how 500 leases are divided when a second cluster joins: by worker, by cluster, and the number of moves.

`python benchmarks/convergence_pictures.py` writes benchmarks/results/*.svg.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import cast

import matplotlib as mpl
import matplotlib.pyplot as plt
from attrs import evolve, frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from leasehold.balancer.rules.shares import least_moves
from leasehold_lab.judge.rights import drop_taken_back_handoffs, find_owner_changes, find_owners_at
from leasehold_lab.judge.run import find_lifetimes, find_workers_alive_at
from leasehold_lab.simulator.question import SimulationQuestion, build_fleet, list_all_workers
from leasehold_lab.simulator.run import run

RESULTS = Path(__file__).resolve().parent / "results"
ASKED = SimulationQuestion(500, (100, 100), kind="scale-out", grouped=True, cycles=12.0, seed=1)
RULES = {"minimal": "tab:blue", "kcl": "tab:orange", "dotnet": "tab:green"}
STEP_SECONDS = 1.0


@frozen
class Story:
    """One run, sampled every second from the start of the second cluster."""

    rules: str
    seconds: tuple[float, ...]
    fewest: tuple[int, ...]
    most: tuple[int, ...]
    first_cluster: tuple[int, ...]
    moves: tuple[int, ...]
    least: int


def story(rules: str) -> Story:
    """Simulate the fleet with these rules, and return the samples."""
    question = evolve(ASKED, rules=rules)
    fleet = build_fleet(question)
    history = run(fleet.scenario)
    all_lives = find_lifetimes(history.incidents)
    owners = find_owners_at(history, fleet.since)
    least_number_of_moves = least_moves(owners, list_all_workers(question), question.groups)
    owner_changes = iter(
        [change for change in drop_taken_back_handoffs(find_owner_changes(history.writes)) if change.t > fleet.since]
    )
    next_change = next(owner_changes, None)
    moves_so_far, samples = 0, []
    for step in range(int((history.end - fleet.since) / STEP_SECONDS)):
        t = fleet.since + step * STEP_SECONDS
        while next_change is not None and next_change.t <= t:
            moves_so_far += next_change.before is not None
            owners[next_change.key] = next_change.after
            next_change = next(owner_changes, None)
        lease_counts = Counter(owner for owner in owners.values() if owner is not None)
        counts = [lease_counts[worker] for worker in find_workers_alive_at(all_lives, t)]
        first_cluster_leases = sum(count for owner, count in lease_counts.items() if owner.startswith("a-"))
        samples.append((t - fleet.since, min(counts), max(counts), first_cluster_leases, moves_so_far))
    seconds, fewest, most, first_cluster, moves = zip(*samples, strict=True)
    return Story(rules, seconds, fewest, most, first_cluster, moves, least_number_of_moves)


def by_worker(figure: Figure, stories: Sequence[Story]) -> Axes:
    """Draw the smallest and the largest number of leases of a worker, separately for each rule set."""
    rows = figure.subplots(len(stories), sharex=True, sharey=True)
    for axes, story_of_rules in zip(rows, stories, strict=True):
        colour = RULES[story_of_rules.rules]
        axes.fill_between(
            story_of_rules.seconds,
            story_of_rules.fewest,
            story_of_rules.most,
            step="post",
            alpha=0.35,
            color=colour,
            label=story_of_rules.rules,
        )
        axes.legend(frameon=False, loc="upper right")
    figure.supylabel("fewest and most leases of a worker", fontsize="medium")
    return cast("Axes", rows[-1])


def by_cluster(figure: Figure, stories: Sequence[Story]) -> Axes:
    """Draw the number of leases of the first cluster."""
    axes = figure.subplots()
    for story_of_rules in stories:
        axes.step(
            story_of_rules.seconds,
            story_of_rules.first_cluster,
            where="post",
            color=RULES[story_of_rules.rules],
            label=story_of_rules.rules,
        )
    axes.axhline(ASKED.leases / 2, color="grey", linewidth=0.8, linestyle=":")
    axes.set(ylabel="leases of the first cluster", ylim=(0, ASKED.leases))
    axes.legend(frameon=False)
    return axes


def by_moves(figure: Figure, stories: Sequence[Story]) -> Axes:
    """Draw the number of moves, and the least number that is necessary to balance the clusters.

    Hand-offs that were taken back do not count. Each label contains the final division, because fewer moves are no
    advantage if the clusters remain uneven.
    """
    axes = figure.subplots()
    for line in stories:
        leases = line.first_cluster[-1]
        label = f"{line.rules}: {line.moves[-1]} moves, and the clusters hold {leases} and {ASKED.leases - leases}"
        axes.step(line.seconds, line.moves, where="post", color=RULES[line.rules], label=label)
        if line.rules == "minimal":
            axes.axhline(line.least, color="grey", linewidth=0.8, linestyle=":")
    axes.set(ylabel="leases moved (dotted: the least)", ylim=(0, 420))
    axes.legend(frameon=False, loc="upper left")
    return axes


def main() -> None:
    """Simulate the fleets, and draw the pictures."""
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)  # lost responses are expected
    mpl.rcParams["svg.hashsalt"] = "leasehold"  # so that equal pictures have equal bytes
    mpl.rcParams["svg.fonttype"] = "none"
    stories = [story(rules) for rules in RULES]
    RESULTS.mkdir(exist_ok=True)
    for name, draw in {"workers": by_worker, "clusters": by_cluster, "moves": by_moves}.items():
        figure = plt.figure(figsize=(6, 3.2), layout="constrained")
        draw(figure, stories).set(xlabel="seconds since 100 workers began to join 100 others", xlim=(0, 120))
        buffer = StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        text = buffer.getvalue().replace("#000000", "currentColor")  # a page in dark mode has light text
        text = text.replace("<text ", '<text fill="currentColor" ').replace("*{stroke", ".drawn *{stroke")
        (RESULTS / f"convergence_{name}.svg").write_text(text, encoding="utf-8")
        print(RESULTS.name, f"convergence_{name}.svg")


if __name__ == "__main__":
    main()
