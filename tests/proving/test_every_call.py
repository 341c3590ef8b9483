"""No single fault of any call of a worker loses a record or leaves a shard unread."""

from collections.abc import Iterator

import pytest
from every_call import CALM, CONFIG, STORIES, CallStory, call_faults, told, tried, undisturbed, unread

from leasehold_lab.simulator.question import suppress_logs

pytestmark = pytest.mark.slow

EACH = 20
"""This test tries one fault out of this many, and `make test-more` another one. `make soak` tries all faults."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with suppress_logs():
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", [0, pytest.param(EACH // 2, marks=pytest.mark.more)])
@pytest.mark.parametrize("place", range(len(STORIES)), ids=[story.name for story in STORIES])
def test_single_fault_loses_no_record(place: int, first: int) -> None:
    """If any single call fails in any way, no record is lost, and every shard keeps a reader."""
    faults = [(place, call_fault) for call_fault in call_faults(STORIES[place])]
    assert len(faults) > 40
    faults = faults[(place + first) % EACH :: EACH]
    assert [breach for indexed_fault in faults for breach in tried(indexed_fault)] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("story", STORIES, ids=[story.name for story in STORIES])
def test_planned_events_leave_no_shard_unread(story: CallStory) -> None:
    """After a start, a drain or a split, shards are read without waiting for the next listing of the table."""
    expiry = CONFIG.lease_seconds if "dead" in story.scenario.owners else 0.0
    unread_seconds = unread(undisturbed(story), CALM, due=True)
    assert {shard: seconds for shard, seconds in unread_seconds.items() if seconds > expiry + 3.0} == {}


def test_stories_include_every_call() -> None:
    """The scenarios together make every kind of call that exists."""
    call_names = {call.what for test_case in STORIES for call in told(test_case).calls}
    assert call_names >= {f"source.{name}" for name in ("shards", "latest", "open")} | {"reader.read", "reader.close"}
    assert call_names >= {"handler", "dead letter", "final checkpoint", "observer", "measure"}
    verbs = ("list", "get", "create", "claim", "renew", "checkpoint", "release", "request", "give", "annotate")
    assert call_names >= {f"store.{verb}" for verb in verbs}
