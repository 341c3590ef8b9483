"""Our workers and Azure's event processors for other languages share a consumer group and a container of blobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest
from hub_stage import CYCLE_SECONDS, OURS, SETTLE_SECONDS, Feed, Group, HubStream, a_container, a_group, flights
from official import MAKES

from leasehold.adapters.toolchain import ServiceError
from leasehold_lab.standins.hubs.event_hubs import LocalHubs
from leasehold_lab.standins.services import AZURITE_ACCOUNT

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("fleets")]

PARTITIONS, EVENTS, A_TICK = 12, 8000, 20
PYTHON = ("python", "asyncio")
LANGUAGES = ("javascript", "java", "go")


def ensure_built(make: str) -> bool:
    """Download and build a processor unless that was done before. Return whether the processor is available."""
    try:
        MAKES[make].start()
    except ServiceError:
        return False
    return True


@contextmanager
def a_fleet(hubs: LocalHubs, hub: str, makes: tuple[str, ...], folder: Path) -> Iterator[Group]:
    """Start one of our workers, which first reads all partitions, and then one worker of each make."""
    with a_container() as container:
        store = f"azblob://{AZURITE_ACCOUNT}/{container}?eventhub={hubs.namespace}/{hub}&group=$Default"
        with a_group(
            Feed(HubStream(hubs, hub, PARTITIONS), flights(EVENTS), A_TICK), folder, store, container
        ) as group:
            join(group, OURS, 1)
            assert group.stage.until(group.balanced, SETTLE_SECONDS)
            for make in makes:
                join(group, make, 1)
            wait_until_even(group, 1 + len(makes))
            yield group


def join(group: Group, make: str, number: int) -> None:
    if make == OURS:
        group.stage.join(f"{make}-{number}")
    else:
        group.join_official(f"{make}-{number}", make, interval=CYCLE_SECONDS / 2)


def wait_until_even(group: Group, workers: int) -> None:
    """Wait until every partition has one reader, and each worker has its share."""
    smaller_share, larger_count = divmod(PARTITIONS, workers)
    assert group.settle() == [smaller_share + 1] * larger_count + [smaller_share] * (workers - larger_count)


def replaced(group: Group, makes: tuple[str, ...]) -> None:
    """Kill the worker of each make in turn. When other workers read its partitions, start another worker of this make.

    Thus, the partitions of each make are resumed by others, and its second worker gets partitions only from others.
    """
    for make in makes:
        group.stage.kill(f"{make}-1")
        assert group.stage.until(lambda: sum(group.shares()) == PARTITIONS, SETTLE_SECONDS), group.readers()
        join(group, make, 2)
        assert group.stage.until(group.balanced, SETTLE_SECONDS), group.readers()
    wait_until_even(group, len(group.stage.list_living_workers()))


def check_language_run(group: Group, makes: tuple[str, ...]) -> None:
    """Finish the run, and check its verdict.

    No record may be lost. Each make must have resumed checkpoints of others, and others must have resumed its own.
    """
    verdict = group.finish()
    takeover_times = {
        incident.subject: round(group.takeover_seconds(incident.subject), 1)
        for incident in group.stage.history.incidents
        if incident.what == "crash"
    }
    print(f"taken over after {takeover_times} s; read twice for {group.doubled_seconds():.1f} s: {verdict}")  # noqa: T201  a measurement
    assert (verdict.faults, verdict.produced, verdict.lost) == ((), EVENTS, 0)
    assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []
    pairs_of_makes = group.passed(verdict)
    for make in makes:
        assert {former_make for former_make, new_make in pairs_of_makes if new_make == make} - {make}, (
            make,
            pairs_of_makes,
        )
        assert {new_make for former_make, new_make in pairs_of_makes if former_make == make} - {make}, (
            make,
            pairs_of_makes,
        )


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_processor_of_each_language_can_be_built(language: str) -> None:
    try:
        program, *_ = MAKES[language].start()
    except ServiceError as missing:
        pytest.skip(f"OURS ARE NOT TESTED BESIDE THE EVENT PROCESSOR FOR {language.upper()}: {missing}")
    assert which(program) is not None, program


@pytest.mark.timeout(600)
def test_our_workers_share_a_group_with_all_languages(meeting_hubs: LocalHubs, tmp_path: Path) -> None:
    makes = (*PYTHON, *(language for language in LANGUAGES if ensure_built(language)))
    with a_fleet(meeting_hubs, "languages", makes, tmp_path) as group:
        replaced(group, (OURS, *makes))
        check_language_run(group, (OURS, *makes))
