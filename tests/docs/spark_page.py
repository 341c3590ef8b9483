"""Tests the programs of docs/spark.md on each version of PySpark that the page names (`make chaos-spark`)."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
import pytest
from pages import blocks
from reader import Reader, Terminal, stand_ins
from standins.spark import SOON, pyspark_path

from leasehold.adapters.spark.pipeline import START_ATTEMPTS, START_TIMEOUT
from leasehold.adapters.toolchain import ServiceError, find_java_home

pytestmark = pytest.mark.timeout(3000)

PAGE = "docs/spark.md"
DEV = "leasehold dev orders=4 --rate 50"
STEP_SECONDS = 600
"""The time limit of a step of the page, in seconds, on a busy machine."""
VERSIONS = "4.0", "4.1", ""
"""The older versions, which are installed from lock files, and the installed version."""
SHARDS = 4
SUPERVISED_BEGINNING = "from pyspark.sql import SparkSession\n\nfrom leasehold.spark import register, supervise"
"""The beginning of the page's second program."""
CONSOLE_ROW = re.compile(r"^\|shardId-\d+\|\s*\S+\|.*\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def pasted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Yield the variables that the page's `leasehold dev` prints to paste."""
    with stand_ins(DEV, tmp_path_factory.mktemp("dev")) as variables:
        yield variables


@pytest.fixture(params=VERSIONS, ids=lambda version: version or "present")
def user(request: pytest.FixtureRequest, pasted: Mapping[str, str], tmp_path: Path) -> Iterator[Reader]:
    """Yield a user with an empty folder, Java, and this version of PySpark."""
    try:
        java = {"JAVA_HOME": str(find_java_home()), "JAVA_TOOL_OPTIONS": SOON, "SPARK_LOCAL_IP": "127.0.0.1"}
    except ServiceError as missing:
        pytest.skip(f"SPARK IS NOT TESTED: {missing}")
    older_path = [str(pyspark_path(request.param))] if request.param else []
    path = os.pathsep.join([*older_path, *filter(None, [os.environ.get("PYTHONPATH")])])
    reader = Reader(tmp_path, {**pasted, **java, "PYTHONPATH": path})
    version = reader.types("python -c 'import pyspark; print(pyspark.__version__)'").strip()
    assert version.startswith(request.param)
    sys.stderr.write(f"PySpark {version}\n")
    yield reader
    reader.close()


def program(beginning: str) -> str:
    """Return the page's program that begins with this text."""
    (text,) = [block.text for block in blocks(PAGE) if block.kind == "python" and block.text.startswith(beginning)]
    return text


def test_a_user_can_run_the_programs_of_the_page(user: Reader) -> None:
    """Each run continues where the previous one stopped, and no row is written twice."""
    (user.folder / "orders.py").write_text(program("# orders.py"))
    batch_numbers = [-1]
    for _ in range(2):
        output = run_to_its_end(user, "python orders.py")
        assert CONSOLE_ROW.search(output), output
        batch_numbers.append(last_committed_batch(user.folder / "orders-checkpoint"))
        assert batch_numbers[-1] > batch_numbers[-2], output

    (user.folder / "supervised.py").write_text(program(SUPERVISED_BEGINNING))
    supervised = user.starts("python supervised.py")
    supervised.statuses = (-signal.SIGINT,)  # the program does not handle KeyboardInterrupt
    until(lambda: len({shard for shard, *_ in rows(user.folder / "orders")}) == SHARDS, supervised)
    interrupt(supervised)
    assert last_committed_batch(user.folder / "orders-checkpoint") > batch_numbers[-1]

    (command,) = [
        command
        for block in blocks(PAGE)
        for command in block.commands
        if block.kind == "sh" and command.startswith("leasehold pipeline")
    ]
    pipeline = user.starts(command)
    while not json.loads(pipeline.line())["rows"]:
        pass
    interrupt(pipeline)
    assert pipeline.process.returncode == 0, pipeline.errors.read_text()
    for sink in (user.folder / "orders", user.folder / "landed" / "rows" / "main"):
        assert max(Counter(rows(sink)).values()) == 1


def run_to_its_end(reader: Reader, command: str) -> str:
    """Run a program and return its output. Run it again if Spark did not start in time on a busy machine."""
    for _ in range(START_ATTEMPTS):
        completed = subprocess.run(
            shlex.split(command),
            cwd=reader.folder,
            env=reader.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=STEP_SECONDS,
        )
        if completed.returncode == 0 or START_TIMEOUT not in completed.stderr:
            break
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def last_committed_batch(checkpoint: Path) -> int:
    """Return the number of the last batch that Spark committed in this checkpointLocation."""
    return max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))


def rows(sink: Path) -> list[tuple[str, str, int]]:
    """Return the shard and position of each row in the finished batches of a Parquet sink."""
    lines = {line for log in sink.glob("_spark_metadata/[0-9]*") for line in log.read_text().splitlines()[1:]}
    paths = {json.loads(line)["path"].removeprefix("file://") for line in lines}
    columns = ["shardId", "sequenceNumber", "subSequenceNumber"]
    return [tuple(row.values()) for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]


def until(condition: Callable[[], bool], terminal: Terminal) -> None:
    """Wait until `condition` returns true. The command must not end before that."""
    deadline = time.monotonic() + STEP_SECONDS
    while not condition():
        assert terminal.process.poll() is None, terminal.errors.read_text()
        assert time.monotonic() < deadline, terminal.errors.read_text()
        time.sleep(0.5)


def interrupt(terminal: Terminal) -> None:
    """Press Ctrl-C, and wait until the command has ended."""
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.process.wait(STEP_SECONDS)
