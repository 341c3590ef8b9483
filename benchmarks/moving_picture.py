"""Draws an animation of a simulated run in which a worker is killed, its leases move, and another worker joins.

`python benchmarks/moving_picture.py` writes benchmarks/results/kill.svg, which the home page of docs/ shows.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import evolve, frozen

from leasehold_lab.judge.rights import drop_taken_back_handoffs, find_owner_changes, find_owners_at
from leasehold_lab.simulator.question import SimulationQuestion, build_config, build_fleet
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member

RESULTS = Path(__file__).resolve().parent / "results"
ASKED = SimulationQuestion(12, (4,), kind="crash", pace="own", checkpoints=1.0, cycles=3.0, seed=1)
KILLED, COMES, ENDS = 3.0, 24.0, 40.0
"""The times in the run when the worker is killed, when another one joins, and when the animation ends."""
SPEED = 2.5
"""The number of seconds of the run that one second of the animation shows."""
NEW = "a-004"
COLUMN, TOP, SIZE, GAP = 124, 56, 26, 8
WIDTH, HEIGHT = 5 * COLUMN + 20, 245
GLIDE = 0.5
STYLE = """
.kill { --kill-ink: #14342f; --kill-line: #cfdad6; --kill-box: #f4f8f6; --kill-alarm: #b3261e;
  font: 18px ui-sans-serif, system-ui, sans-serif; max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { .kill { --kill-ink: #e3efeb; --kill-line: #35504a;
  --kill-box: #152a26; --kill-alarm: #ff9d93; } }
.kill text { fill: var(--kill-ink); text-anchor: middle; }
.kill .said { font-size: 22px; }
.kill .box { fill: var(--kill-box); stroke: var(--kill-line); }
.kill .gone { fill: var(--kill-alarm); font-weight: 600; }
.kill .lease text { fill: #fff; font-size: 14px; font-weight: 600; }
.kill .moving { animation-duration: DURATIONs; animation-iteration-count: infinite; animation-timing-function: linear; }
.kill:hover .moving { animation-play-state: paused; }
@media (prefers-reduced-motion: reduce) { .kill .moving { animation: none; } }
""".strip()
COLOURS = ("#0f766e", "#1d5fa8", "#8a4b08", "#7c3aa0", "#4d6b1e")


@frozen
class Step:
    """CSS declarations that apply from this time on."""

    at: float
    style: str


@frozen
class Story:
    """The events of the run.

    Attributes:
        killed: The id of the killed worker.
        owners: The initial owner of each lease.
        passed: The changes of owners, each as the time, the lease and the new owner.
    """

    killed: str
    owners: Mapping[str, str]
    passed: tuple[tuple[float, str, str | None], ...]

    @property
    def freed(self) -> tuple[float, float]:
        """The times when the first and the last lease of the killed worker were taken."""
        times = [time for time, _, owner in self.passed if owner and time < COMES]
        return min(times), max(times)


def simulate_story() -> Story:
    """Simulate a balanced fleet, the kill, and a worker that joins later, and return the events."""
    fleet = build_fleet(ASKED)
    joining_worker = Member(NEW, build_config(ASKED), starts=fleet.since + COMES - KILLED)
    history = run(evolve(fleet.scenario, members=(*fleet.scenario.members, joining_worker)))
    start_time = fleet.since - KILLED
    (killed,) = (incident.subject.partition("#")[0] for incident in history.incidents if incident.what == "crash")
    owners = {key: owner for key, owner in find_owners_at(history, fleet.since).items() if owner}
    owner_changes = [
        (change.t - start_time, change.key, change.after)
        for change in drop_taken_back_handoffs(find_owner_changes(history.writes))
        if start_time < change.t < start_time + ENDS
    ]
    return Story(killed, owners, tuple(owner_changes))


def make_keyframes(name: str, steps: Iterable[Step]) -> str:
    """Return the CSS keyframes of an element that moves from step to step."""
    frames: list[str] = []
    style = ""
    for step in steps:
        if frames:
            frames.append(f"{100 * step.at / ENDS:.2f}% {{ {style} }}")
        arrival = 0.0 if not frames else min(step.at + GLIDE, ENDS)
        frames.append(f"{100 * arrival / ENDS:.2f}% {{ {step.style} }}")
        style = step.style
    return f"@keyframes kill-{name} {{ {' '.join(frames)} 100% {{ {style} }} }}"


def positions_of_leases(events: Story, workers: list[str]) -> dict[str, list[Step]]:
    """Return the positions of each lease over time. A lease is in the first free slot of its owner's box."""
    slots: dict[str, dict[int, str]] = {worker: {} for worker in workers}
    steps: dict[str, list[Step]] = {}
    slot_of_lease: dict[str, tuple[str, int]] = {}
    initial_owners = [(0.0, key, owner) for key, owner in sorted(events.owners.items())]
    for second, key, owner in [*initial_owners, *events.passed]:
        if owner is None:
            continue  # a free lease stays where it was until a worker takes it
        if key in slot_of_lease:
            del slots[slot_of_lease[key][0]][slot_of_lease[key][1]]
        slot = next(free for free in range(12) if free not in slots[owner])
        slots[owner][slot], slot_of_lease[key] = key, (owner, slot)
        x = 20 + workers.index(owner) * COLUMN + 13 + slot % 3 * (SIZE + GAP)
        y = TOP + 40 + slot // 3 * (SIZE + GAP)
        steps.setdefault(key, []).append(Step(second, f"transform: translate({x}px, {y}px)"))
    return steps


def animated_element(name: str, steps: list[Step], still: str, words: str) -> tuple[str, str]:
    """Return the keyframes of an element, and the element. `still` is its style for readers who disabled animations."""
    return make_keyframes(name, steps), f'<g class="moving" style="{still}; animation-name: kill-{name}">{words}</g>'


def draw(events: Story) -> str:
    """Return the animation as SVG."""
    workers = [*sorted(set(events.owners.values())), NEW]
    names = {worker: f"worker-{index}" for index, worker in enumerate(workers, 1)}
    first, last = events.freed
    leases_of_new_worker = sum(owner == NEW for _, _, owner in events.passed)
    frames: list[str] = []
    elements: list[str] = []

    def add(name: str, steps: list[Step], final_step: str, words: str) -> None:
        keyframes, element = animated_element(name, steps, final_step, words)
        frames.append(keyframes)
        elements.append(element)

    visible, hidden, pale = "opacity: 1", "opacity: 0", "opacity: 0.3"
    for index, worker in enumerate(workers):
        x = 20 + index * COLUMN
        box = f'<rect class="box" x="{x}" y="{TOP}" width="{COLUMN - 10}" height="150" rx="10"/>'
        box += f'<text x="{x + 57}" y="{TOP + 24}">{names[worker]}</text>'
        killed_label = f'<text class="gone" x="{x + 57}" y="{TOP + 170}">killed</text>'
        if worker == events.killed:
            add(f"box-{index}", [Step(0, visible), Step(KILLED, "opacity: 0.45")], "opacity: 0.45", box)
            add(f"gone-{index}", [Step(0, hidden), Step(KILLED, visible)], visible, killed_label)
        elif worker == NEW:
            add(f"box-{index}", [Step(0, pale), Step(COMES, visible)], pale, box)
        else:
            elements.append(box)
    captions = [
        (0.0, "12 leases, 4 workers, no coordinator"),
        (KILLED, f"kill -9 {names[events.killed]}: no one is notified"),
        (first, f"{first - KILLED:.0f} s later: its leases have expired, and are taken"),
        (last + 3, "all is read again, from the checkpoints"),
        (COMES, f"{names[NEW]} starts: {leases_of_new_worker} leases are handed over"),
    ]
    ends = [time for time, _ in captions[1:]] + [ENDS]
    for index, ((time, words), end) in enumerate(zip(captions, ends, strict=True)):
        steps = [Step(0, visible if time == 0 else hidden), *([Step(time, visible)] if time else [])]
        steps += [Step(end, hidden)] if end < ENDS else []
        text = f'<text class="said" x="{WIDTH / 2:.0f}" y="34">{words}</text>'
        add(f"said-{index}", steps, visible if index == len(captions) - 2 else hidden, text)
    for key, steps in positions_of_leases(events, workers).items():
        colour = COLOURS[workers.index(events.owners[key])]
        square = f'<rect width="{SIZE}" height="{SIZE}" rx="6" fill="{colour}"/>'
        square += f'<text x="{SIZE / 2:.0f}" y="18">{int(key.rpartition("-")[2]) + 1}</text>'
        final_step = [step for step in steps if step.at < COMES][-1]
        add(key, steps, final_step.style, f'<g class="lease">{square}</g>')
    style = "\n".join([STYLE.replace("DURATION", f"{ENDS / SPEED:g}"), *frames])
    body = "\n".join(elements)
    head = f'<svg class="kill" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    return f"{head}\n<style>\n{style}\n</style>\n{body}\n</svg>\n"


def main() -> None:
    """Simulate the run, and write the animation."""
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)  # lost responses are expected
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kill.svg").write_text(draw(simulate_story()), encoding="utf-8")
    print(RESULTS.name, "kill.svg")


if __name__ == "__main__":
    main()
