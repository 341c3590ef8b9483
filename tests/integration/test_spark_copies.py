"""Two drivers on copies of one checkpointLocation, which share a lease table and write to one stream."""

import shutil
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from spark_pipeline_kills import Pipeline, Row, judged, plain
from waiters import until

from leasehold_lab.demo.stage import Stream, client, put

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.services, pytest.mark.timeout(900)]
SECONDS = 400.0


def done_since(folder: Path, before: set[str]) -> list[str]:
    """Return the batches that Spark has committed besides these."""
    return [each.name for each in (folder / "progress/commits").glob("[0-9]*") if each.name not in before]


@pytest.mark.usefixtures("java")
def test_two_drivers_on_copies_of_a_checkpoint_lose_no_row(kinesis_url: str, dynalite_url: str, tmp_path: Path) -> None:
    """Both drivers have the query's id, but readers do not take the rows of one for repetitions of the other's."""
    here, there = (
        Pipeline(tmp_path / name, kinesis_url, dynalite_url, 0, "", time.monotonic() + SECONDS, name="copies")
        for name in "ab"
    )
    here.folder.mkdir()
    sent = list[Row]()

    def send(count: int) -> None:
        sent.extend((f"{n % 16}", f"{n}".encode()) for n in range(len(sent), len(sent) + count))
        put(to, read.name, sent[-count:])

    wrote = Stream(kinesis_url, "copies-out", 2)
    read = Stream(kinesis_url, "copies-in", 3)
    with closing(read), closing(wrote), closing(client(kinesis_url)) as to:
        send(200)
        app = here.begin(kinesis_url)
        until(lambda: list((here.folder / "progress/commits").glob("1")), "the first batches", SECONDS)
        here.end(app)
        shutil.copytree(here.folder, there.folder)
        apps = [each.begin(kinesis_url) for each in (here, there)]
        try:
            for each, running in zip((here, there), apps, strict=True):
                more = partial(done_since, each.folder, set(done_since(each.folder, set())))
                send(200)
                until(more, running.name, SECONDS)
        finally:
            for each, running in zip((here, there), apps, strict=True):
                each.end(running)
        (here.folder / "last").touch()
        app = here.begin(kinesis_url)
        try:
            until(lambda: not app.running, "the last run", SECONDS)
            assert app.wait() == 0, app.said
        finally:
            here.end(app)
        verdict = judged(sent, plain(tmp_path, wrote, len(sent)))
    print(verdict)  # noqa: T201  shown if it fails, or with -s
    assert verdict.lost == 0
