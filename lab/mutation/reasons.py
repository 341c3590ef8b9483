"""Checks reasons.toml: plants the violation of each reason in a copy of the tree, and expects the tests to fail.

    python lab/mutation/reasons.py                  all rooms
    python lab/mutation/reasons.py --only multilang one room
    python lab/mutation/reasons.py --check          only check that the code and the tests of each reason exist

A reason is a sentence, next to some code, that states what would go wrong without this code. reasons.toml has a list of
reasons for each room (a part of the code):

    why        a short form of the reason
    file       the path of the module
    was, now   code that occurs once in the module, and its replacement
    tests      tests that all pass without the change, and at least one of which must fail with it
    untested   used instead of `tests`: the reason why no test can detect the change
"""

# ruff: noqa: T201  a script prints its findings

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPY = ROOT / "build" / "reasons"
COPIED_NAMES = ("leasehold", "lab", "tests", "specs", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
ARGUMENTS = ("-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=60")
SECONDS = 300.0
FAILED = 1
"""The exit status of pytest if a test failed. Any other status proves nothing about the change."""


@frozen
class Reason:
    """A reason, a change that violates it, and the tests that must then fail."""

    room: str
    why: str
    file: str
    was: str = ""
    now: str = ""
    tests: tuple[str, ...] = ()
    untested: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"

    def list_mistakes(self) -> Iterator[str]:
        """Yield the mistakes in the entry itself."""
        path = ROOT / self.file
        if not path.exists():
            yield f"{self}: the file is gone"
            return
        if not self.why or bool(self.tests) == bool(self.untested):
            yield f"{self}: it needs a reason, and either tests or why there are none"
        if self.tests and self.was == self.now:
            yield f"{self}: the change changes nothing"
        occurrence_count = path.read_text(encoding="utf-8").count(self.was) if self.was else 0
        if occurrence_count != 1:
            yield f"{self}: {self.was!r} occurs {occurrence_count} times"
        for test in self.tests:
            file, _, name = test.partition("::")
            name = name.partition("[")[0].rpartition("::")[2]
            if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8"):
                yield f"{self}: {test} is gone"


def read_reasons(only: str = "") -> tuple[Reason, ...]:
    """Return the listed reasons, or only those of the room `only` if it is given."""
    entries_by_room = tomllib.loads((HERE / "reasons.toml").read_text(encoding="utf-8"))
    return tuple(
        Reason(room, **{**entry, "tests": tuple(entry.get("tests", ()))})
        for room, entries in entries_by_room.items()
        for entry in entries
        if only in {"", room}
    )


def copy_tree() -> None:
    """Copy the parts of the tree that tests need to COPY, and link the local services."""
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    for name in COPIED_NAMES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, COPY / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(source, COPY / name)
    if (ROOT / ".local").exists():  # the local services
        (COPY / ".local").symlink_to((ROOT / ".local").resolve())


def run_tests(tests: Sequence[str]) -> int:
    """Run these tests in the copy, and return the exit status of pytest, or -1 if they take too long."""
    command = (sys.executable, "-m", "pytest", *ARGUMENTS, *dict.fromkeys(tests))
    environment = {**os.environ, "PYTHONPATH": str(COPY), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        process = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return -1
    return process.returncode


def violation_is_noticed(reason: Reason) -> bool:
    """Plant the violation of this reason, and return whether one of the reason's tests fails."""
    path = COPY / reason.file
    original_text = path.read_text(encoding="utf-8")
    path.write_text(original_text.replace(reason.was, reason.now), encoding="utf-8")
    try:
        return run_tests(reason.tests) == FAILED
    finally:
        path.write_text(original_text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one room")
    parser.add_argument("--check", action="store_true", help="plant nothing")
    options = parser.parse_args()
    chosen_reasons = read_reasons(options.only)
    if not chosen_reasons:
        parser.error(f"--only: reasons.toml has no room {options.only}")
    mistakes = [mistake for reason in chosen_reasons for mistake in reason.list_mistakes()]
    print("\n".join(mistakes), end="\n" if mistakes else "")
    if options.check or mistakes:
        return int(bool(mistakes))
    copy_tree()
    reasons_with_tests = [reason for reason in chosen_reasons if reason.tests]
    if run_tests([test for reason in reasons_with_tests for test in reason.tests]):
        print("a test of the list fails without any change")
        return 1
    missed_count = 0
    for reason in reasons_with_tests:
        if not violation_is_noticed(reason):
            missed_count += 1
            print(f"NOT SEEN  {reason}", flush=True)
    tested_count = len(reasons_with_tests)
    print(f"{tested_count - missed_count} of {tested_count} seen, {len(chosen_reasons) - tested_count} untested")
    return int(missed_count > 0)


if __name__ == "__main__":
    sys.exit(main())
