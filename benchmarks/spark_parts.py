"""Divides the processor time of a Spark query among its processes and, within Java, among its threads by name."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

COMPILING = "Java: compiling itself"
PARTS = (
    "the process that reads or plans",
    "Python of the tasks",
    "Java: tasks, rows of Arrow to Spark's",
    "Java: collecting garbage",
    "Java: planning and all else",
    "programs that Java starts",
    COMPILING,
)
READS, TASKS, ROWS, GARBAGE, ELSE, PROGRAMS, _ = PARTS
THREADS = {"Executor task": ROWS, "C1 Comp": COMPILING, "C2 Comp": COMPILING, "GC ": GARBAGE, "G1 ": GARBAGE}
RUNNER, WORKER, JAVA = b"python_streaming_source_runner", b"pyspark.daemon", b"java"


def spent() -> Mapping[str, float]:
    """Return the processor seconds used so far by all child processes, including those that have ended, by part."""
    ticks_by_part: Counter[str] = Counter()
    for process in _descendants(os.getpid()):
        with suppress(OSError):  # the process has ended
            command = (process / "cmdline").read_bytes()
            own_ticks, ended_children = _ticks(process / "stat")
            ticks_by_part[PROGRAMS] += ended_children
            if command.partition(b"\0")[0].endswith(JAVA):
                threads = Counter[str]()
                for thread in (process / "task").iterdir():
                    with suppress(OSError):
                        threads[_part((thread / "comm").read_text())] += _ticks(thread / "stat")[0]
                ticks_by_part += threads
                ticks_by_part[ELSE] += own_ticks - threads.total()
            else:
                ticks_by_part[READS if RUNNER in command else TASKS if WORKER in command else PROGRAMS] += own_ticks
    return {part: part_ticks / os.sysconf("SC_CLK_TCK") for part, part_ticks in ticks_by_part.items()}


def _part(thread: str) -> str:
    return next((part for name, part in THREADS.items() if thread.startswith(name)), ELSE)


def _ticks(stat: Path) -> tuple[int, int]:
    """Return the clock ticks of a process or thread, and those of its children that have ended."""
    fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])


def _descendants(root: int) -> Iterator[Path]:
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (process / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            parents[int(process.name)] = int(fields[1])
    for number, above in parents.items():
        while above not in {0, root}:
            above = parents.get(above, 0)  # noqa: PLW2901  up to the root, or to 0
        if above == root:
            yield Path("/proc") / str(number)
