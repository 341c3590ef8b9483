"""The judge of a mixed group tolerates only the reordering that the SDK of an official worker causes."""

from attrs import evolve
from hub_stage import in_order_where_official

from leasehold_lab.judge.events import Incident, ReadingEvent, RunHistory, SentRecord
from leasehold_lab.judge.explanations import judge_finished_run


def tenure(process: str, since: float, *numbers: int) -> list[ReadingEvent]:
    """Return the events of a tenure that begins at `since` and dispatches records of one partition in this order."""
    record_events = [
        ReadingEvent(since + 1 + index, process, "record", "3", (number, 0), "3", f"d{number}")
        for index, number in enumerate(numbers)
    ]
    last_event = ReadingEvent(since + 1 + len(numbers), process, "lease-lost", "3")
    return [ReadingEvent(since, process, "initialize", "3"), *record_events, last_event]


def faults(*tenures: list[ReadingEvent]) -> set[str]:
    """Return the rules that these tenures break in a run of six records. The worker official-2 is an official one."""
    events = [event for tenure_events in tenures for event in tenure_events]
    sent_records = [SentRecord("3", number, f"d{number}", 0.0) for number in range(6)]
    processes = sorted({event.process for event in events})
    incidents = [Incident(0.0, "start", process) for process in processes]
    history = RunHistory(sent=sent_records, events=events, incidents=incidents, parents={"3": ()}, end=events[-1].t)
    ordered_events = in_order_where_official(history.events, ["official-2"])
    return {breach.what for breach in judge_finished_run(evolve(history, events=ordered_events)).faults}


def test_an_official_worker_may_swap_records_within_its_tenure() -> None:
    """Records may be swapped because Azure's client for Python reads a link with two threads."""
    assert faults(tenure("official-2", 1.0, 0, 1, 4, 5, 2, 3)) == set()
    assert faults(tenure("official-2", 1.0, 0, 2, 1), tenure("ours-1", 9.0, 3, 4, 5)) == set()


def test_our_workers_must_dispatch_in_order() -> None:
    assert faults(tenure("ours-1", 1.0, 0, 1, 4, 5, 2, 3)) == {"out of order"}
    assert faults(tenure("official-2", 1.0, 1, 0), tenure("ours-1", 9.0, 2, 4, 3, 5)) == {"out of order"}


def test_lost_records_and_disorder_between_workers_are_detected() -> None:
    assert faults(tenure("official-2", 1.0, 0, 1, 4, 5, 3)) == {"lost"}
    assert faults(tenure("official-2", 1.0, 0, 5), tenure("ours-1", 9.0, 1, 2, 3, 4)) == {"out of order"}
    assert faults(tenure("official-2", 1.0, 0, 5), tenure("official-2", 9.0, 1, 2, 3, 4)) == {"out of order"}
