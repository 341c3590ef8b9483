"""Tests of a fleet whose handlers are Lambda functions that use Powertools, and which loses a worker."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from threading import Event, Thread
from uuid import uuid4

import pytest
from attrs import define, field, frozen
from waiters import WAIT, until

from leasehold.adapters.consumer.dead_letters.dead_letter import dead_letter_from
from leasehold.stores.urls import open_store
from leasehold_lab.demo.stage import Stream
from leasehold_lab.standins.tables import TableStreams, run_table_server

pytestmark = [pytest.mark.more, pytest.mark.slow, pytest.mark.services]

LOCK = Path(__file__).parents[2] / "requirements-lambda.lock"
KEYS, RECORDS, AT_ONCE = 8, 400, 20
POISON = (51, 202, 353)

KINESIS = """
from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.batch import AsyncBatchProcessor, EventType, async_process_partial_response

logger = Logger()
processor = AsyncBatchProcessor(event_type=EventType.KinesisDataStreams)

async def one(record):
    logger.info(record.kinesis.data_as_text)
    record.kinesis.data_as_json()

@logger.inject_lambda_context
def lambda_handler(event, context):
    return async_process_partial_response(event, one, processor, context)
"""

TABLE = """
from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.batch import {processor}, EventType, {process}

logger = Logger()
processor = {processor}(event_type=EventType.DynamoDBStreams)

{kind} one(record):
    text = record.dynamodb.new_image["text"]
    logger.info(text)
    if "poison" in text:
        raise ValueError(text)

@logger.inject_lambda_context
def lambda_handler(event, context):
    return {process}(event, one, processor, context)
"""

FORMS = {
    "sync": {"processor": "BatchProcessor", "process": "process_partial_response", "kind": "def"},
    "async": {"processor": "AsyncBatchProcessor", "process": "async_process_partial_response", "kind": "async def"},
}


@pytest.fixture(scope="module")
def powertools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the locked packages into a new folder, and return the folder."""
    folder = tmp_path_factory.mktemp("powertools")
    uv = Path(sys.executable).with_name("uv")
    options = ("--require-hashes", "--only-binary", ":all:", "-r", str(LOCK))
    subprocess.run(
        [uv, "pip", "install", "-q", "--python", sys.executable, "--target", folder, *options],
        check=True,
        timeout=WAIT,
    )
    return folder


@pytest.fixture
def sample(powertools: Path) -> str:
    """Return the Kinesis sample from the documentation in the installed package."""
    documentation = (powertools / "aws_lambda_powertools" / "utilities" / "batch" / "base.py").read_text()
    programs = re.findall(r"^ *```python\n(.*?)^ *```$", documentation, re.MULTILINE | re.DOTALL)
    return next(
        dedent(program) for program in programs if "KinesisStreamRecord" in program and "async def" not in program
    )


OBSERVED = """
import json, time
import sample

def lambda_handler(event, context):
    call = {"at": time.time(), "failed": "all", "texts": [text_of(record) for record in event["Records"]]}
    try:
        response = sample.lambda_handler(event, context)
        call["failed"] = [numbers(event).index(each["itemIdentifier"]) for each in response["batchItemFailures"]]
        return response
    finally:
        with open(f"{context.log_stream_name}.calls", "a") as out:
            out.write(json.dumps(call) + "\\n")

def numbers(event):
    return [(record.get("kinesis") or record["dynamodb"]).get("sequenceNumber") or record["dynamodb"]["SequenceNumber"]
            for record in event["Records"]]

def text_of(record):
    if "kinesis" in record:
        import base64
        return base64.b64decode(record["kinesis"]["data"]).decode()
    return record["dynamodb"]["NewImage"]["text"]["S"]
"""


@frozen
class Call:
    """One finished call of a function: its start time, its records, and the indexes of the failed records."""

    at: float
    texts: list[str]
    failed: list[int]

    @property
    def handled(self) -> list[str]:
        return [text for index, text in enumerate(self.texts) if index not in self.failed]


@define
class Functions:
    """Worker processes that call a function, and the calls that the function has logged."""

    folder: Path
    packages: Path
    command: list[str]
    processes: dict[str, "subprocess.Popen[bytes]"] = field(factory=dict)

    def start(self, worker: str) -> None:
        path = os.pathsep.join(
            path_entry for path_entry in (os.environ.get("PYTHONPATH", ""), str(self.packages)) if path_entry
        )
        handler = f"lambda:observed.lambda_handler?report_batch_item_failures=true&name={worker}"
        with (self.folder / f"{worker}.log").open("wb") as out:
            self.processes[worker] = subprocess.Popen(
                [*self.command, "--worker", worker, "--handler", handler],
                cwd=self.folder,
                stdout=out,
                env=os.environ | {"PYTHONPATH": path},
            )

    def calls(self, worker: str) -> list[Call]:
        """Return the finished calls of this worker. The last line of a killed worker, which may be cut, is left out."""
        path = self.folder / f"{worker}.calls"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        finished_calls = [json.loads(line) for line in lines]
        failed_indexes = [
            [*range(len(logged_call["texts"]))] if logged_call["failed"] == "all" else logged_call["failed"]
            for logged_call in finished_calls
        ]
        return [
            Call(logged_call["at"], logged_call["texts"], indexes)
            for logged_call, indexes in zip(finished_calls, failed_indexes, strict=True)
        ]

    def handled(self) -> list[str]:
        """Return the texts of the records that calls have handled, in the order of the calls."""
        calls = sorted((call for worker in self.processes for call in self.calls(worker)), key=lambda call: call.at)
        return [text for call in calls for text in call.handled]

    def owners(self) -> set[str | None]:
        """Return the owners of all leases."""
        with closing(open_store(f"sqlite:///{self.folder}/leases.db")) as store:
            return {lease.owner for lease in store.list().leases}

    def letters(self) -> list[str]:
        """Return the poisoned texts in the dead letters, sorted."""
        datas = (
            dead_letter_from(path.read_bytes()).record.data.decode() for path in (self.folder / "dead").glob("*.json")
        )
        return sorted(text for data in datas for text in re.findall(r"poison \d+", data))

    def end(self, live_workers: list[str]) -> None:
        for worker in live_workers:
            self.processes[worker].terminate()
        assert [self.processes[worker].wait(60) for worker in live_workers] == [0] * len(live_workers)


@contextmanager
def functions(folder: Path, packages: Path, program: str, source: str) -> Iterator[Functions]:
    """Yield a fleet without workers. Its workers are killed at the end of the block."""
    (folder / "sample.py").write_text(program)
    (folder / "observed.py").write_text(OBSERVED)
    arguments = ("consume", source, "--store", "sqlite://leases.db", "--from", "TRIM_HORIZON", "--lease-seconds", "3")
    failure_options = ("--attempts", "2", "--dead-letter", "file://dead", "--max-records", str(AT_ONCE))
    command = [sys.executable, "-m", "leasehold.adapters.cli.main", *arguments, *failure_options]
    fleet = Functions(folder, packages, command)
    try:
        yield fleet
    finally:
        for process in fleet.processes.values():
            process.kill()
            process.wait()


def text_of(number: int) -> str:
    """Return the text of the record with this number. A poisoned text is not JSON."""
    return f"poison {number}" if number in POISON else json.dumps({"key": number % KEYS, "number": number})


def judge(fleet: Functions, texts: list[str]) -> None:
    """Check that no record is lost, that each key is in order, and that retries began with the failed record."""
    poisoned_texts = [texts[number] for number in POISON]
    first_dispatches = [*dict.fromkeys(fleet.handled())]
    assert set(first_dispatches) == set(texts) - set(poisoned_texts)
    numbers_by_key = defaultdict[int, list[int]](list)
    for number in map({text: number for number, text in enumerate(texts)}.__getitem__, first_dispatches):
        numbers_by_key[number % KEYS].append(number)
    assert {key: sorted(numbers) for key, numbers in numbers_by_key.items()} == numbers_by_key
    repeat_count = 0
    for worker in fleet.processes:
        for text in poisoned_texts:
            calls_with_text = [call for call in fleet.calls(worker) if text in call.texts]
            for former_call, next_call in pairwise(calls_with_text):
                assert next_call.texts[0] == former_call.texts[min(former_call.failed)] == text
                repeat_count += 1
    assert repeat_count >= len(POISON)
    assert fleet.letters() == sorted(poisoned_texts)


@pytest.mark.parametrize("form", ["sample", "async"])
def test_a_kinesis_function_loses_no_record_in_a_split_and_a_kill(
    form: str, sample: str, powertools: Path, tmp_path: Path, kinesis_url: str
) -> None:
    """The sample of Powertools works unchanged, and so does an async batch processor."""
    stream = Stream(kinesis_url, f"functions-{uuid4().hex[:8]}", 3)
    all_read = Event()
    texts = [text_of(number) for number in range(RECORDS)]

    def write_records() -> None:
        for number in range(RECORDS):
            if number == RECORDS // 2:
                assert all_read.wait(WAIT)
                stream.split()
            stream.put((f"key-{number % KEYS}", texts[number].encode()))

    program = sample if form == "sample" else KINESIS
    with functions(tmp_path, powertools, program, f"{stream.url}&region=eu-west-1") as fleet:
        for worker in ("a-1", "b-1", "c-1"):
            fleet.start(worker)
        until(lambda: fleet.owners() == set(fleet.processes), "each has a shard")
        writes = Thread(target=write_records)
        writes.start()
        until(lambda: all(fleet.calls(worker) for worker in fleet.processes), "all three have called it")
        fleet.processes["b-1"].kill()
        all_read.set()
        until(lambda: len(set(fleet.handled())) == RECORDS - len(POISON), "all but the poison is handled")
        until(lambda: len(set(fleet.letters())) == len(POISON), "the poison is dead-lettered")
        writes.join()
        fleet.end(["a-1", "c-1"])
        judge(fleet, texts)
    stream.close()


@pytest.mark.parametrize("form", [*FORMS])
def test_a_table_function_loses_no_change_in_rolling_shards_and_a_kill(
    form: str, powertools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function for the stream of a table gets the changes in order.

    After a failure, the next batch begins with the record that the function reported as failed.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    texts = [text_of(number) for number in range(RECORDS)]
    table = TableStreams(open_shard_count=3, stale_seconds=0.5)
    all_read = Event()

    def write_changes() -> None:
        for number in range(RECORDS):
            if number == RECORDS // 2:
                assert all_read.wait(WAIT)
                table.end_open_shards()
            table.put(f"i-{number % KEYS}", {"text": {"S": texts[number]}})

    with run_table_server(table) as endpoint:
        source = f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"
        with functions(tmp_path, powertools, TABLE.format(**FORMS[form]), source) as fleet:
            for worker in ("a-1", "b-1", "c-1"):
                fleet.start(worker)
            until(lambda: fleet.owners() == set(fleet.processes), "each has a shard")
            writes = Thread(target=write_changes)
            writes.start()
            until(lambda: all(fleet.calls(worker) for worker in fleet.processes), "all three have called it")
            fleet.processes["b-1"].kill()
            all_read.set()
            until(lambda: len(set(fleet.handled())) == RECORDS - len(POISON), "all but the poison is handled")
            until(lambda: len(set(fleet.letters())) == len(POISON), "the poison is dead-lettered")
            writes.join()
            fleet.end(["a-1", "c-1"])
            assert len(table.shards) > 3
            judge(fleet, texts)
