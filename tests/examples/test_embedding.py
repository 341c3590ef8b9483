"""Tests that the examples of embedding work as their page states: sources, planners and sinks without a cloud."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from children import child

from leasehold_lab.standins.node import find_node

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LINES = 40
Contents = Callable[[str], list[str]]
Sink = tuple[str, Contents]


def write_files(folder: Path, names: tuple[str, ...] = ("a.log",)) -> dict[str, list[str]]:
    """Write files with these names, and return the lines of each."""
    lines = {name: [f"{name} {number}" for number in range(LINES)] for name in names}
    for name, file_lines in lines.items():
        (folder / name).write_text("".join(f"{line}\n" for line in file_lines))
    return lines


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.more)])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    """Return the argument for a sink, and a function that reads the lines of a shard from it."""
    if request.param == "file":
        (tmp_path / "out").mkdir()
        return f"file:{tmp_path / 'out'}", lambda shard: (tmp_path / "out" / f"{shard}.out").read_text().splitlines()
    conninfo = request.getfixturevalue("conninfo")
    from psycopg import connect  # noqa: PLC0415  where there is a server

    def contents(shard: str) -> list[str]:
        with connect(conninfo) as connection:
            rows = connection.execute("SELECT data FROM output WHERE shard = %s ORDER BY id", (shard,))
            return [data for (data,) in rows]

    with connect(conninfo) as connection:
        connection.execute("DROP TABLE IF EXISTS progress, output")
    return f"postgres:{conninfo}", contents


def start_worker(
    tmp_path: Path, me: str, sink: str, fault: str = "lives"
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a worker that reads the files in this test's folder."""
    words = [str(Path(__file__).with_name("consumer_child.py")), str(tmp_path), str(tmp_path / "leases.db")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(EXAMPLES), str(ROOT)))}
    return child([sys.executable, *words, me, sink, fault], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of the process's output."""
    assert process.stdout is not None
    return process.stdout.readline()


def stop(process: subprocess.Popen[str]) -> int:
    """Stop the process, and return its exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(60)


def test_sink_repeats_nothing_after_a_kill_before_the_checkpoint(tmp_path: Path, sink: Sink) -> None:
    words, contents = sink
    lines = write_files(tmp_path)
    with start_worker(tmp_path, "w-1", words, "killed") as first_process:
        assert first_process.wait(60) == -signal.SIGKILL
    assert contents("a.log") == lines["a.log"]  # the sink has all lines, but there is no checkpoint
    with start_worker(tmp_path, "w-2", words) as second_process:
        assert next_line(second_process) == "done a.log\n"  # the batch is handled again
        with (tmp_path / "a.log").open("a") as file:
            file.write("one more\n")
        assert next_line(second_process) == "done a.log\n"
        assert stop(second_process) == 0
    assert contents("a.log") == [*lines["a.log"], "one more"]


def test_sink_rejects_a_write_with_an_old_fencing_number(tmp_path: Path, sink: Sink) -> None:
    words, contents = sink
    lines = write_files(tmp_path)
    with start_worker(tmp_path, "w-1", words, "stopped") as stopped_process:
        assert os.WIFSTOPPED(os.waitpid(stopped_process.pid, os.WUNTRACED)[1])
        with start_worker(tmp_path, "w-2", words) as second_process:
            assert next_line(second_process) == "done a.log\n"
            stopped_process.send_signal(signal.SIGCONT)
            assert next_line(stopped_process) == "fenced a.log\n"
            assert stop(second_process) == 0
    assert contents("a.log") == lines["a.log"]


def test_half_written_batch_of_a_killed_worker_is_truncated(tmp_path: Path) -> None:
    lines = write_files(tmp_path)
    output_path = tmp_path / "a.log.out"
    output_path.write_text("a.log 0\na.lo")
    with start_worker(tmp_path, "w-1", f"file:{tmp_path}") as process:
        assert next_line(process) == "done a.log\n"
        assert stop(process) == 0
    assert output_path.read_text().splitlines() == lines["a.log"]


def test_directory_files_are_shared_and_resumed(tmp_path: Path) -> None:
    """The page's program reads two files. One of them grows while it is read."""
    lines = write_files(tmp_path, ("a.log", "b.log"))
    command = [sys.executable, str(EXAMPLES / "directory.py"), str(tmp_path), str(tmp_path / "leases.db")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with child([*command, "w-1"], env=env, stdout=subprocess.PIPE) as process:
        lines_read = [next_line(process).split(" ", 2) for _ in range(2 * LINES)]
        with (tmp_path / "a.log").open("a") as file:
            file.write("half a line")
            file.flush()
            file.write(", and the rest\n")
        assert next_line(process).endswith("half a line, and the rest\n")
        assert stop(process) == 0
    for name, file_lines in lines.items():
        assert [text.strip() for shard, _epoch, text in lines_read if shard == name] == file_lines


@pytest.mark.more
@pytest.mark.slow
def test_node_planner_example_prints_what_the_page_shows() -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    plan = [sys.executable, "-c", "from leasehold.adapters.cli.main import run; run()", "plan"]
    output = subprocess.run(
        [*find_node().node, str(EXAMPLES / "plan.mjs"), *plan], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (output.returncode, output.stderr) == (0, "")
    assert output.stdout == "node-a: 6\nnode-a: 3, node-b: 3\nnode-b: 6\n"
    assert "first one has six leases, then each has three, then one dies and the other has six again" in " ".join(
        page.split()
    )
    assert "`node docs/examples/plan.mjs leasehold plan`" in page


def test_every_example_is_named_on_a_page() -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    files = sorted(path.name for path in EXAMPLES.iterdir() if path.is_file())
    assert sorted(set(re.findall(r"\]\(examples/([\w.]+)\)", page))) == files
