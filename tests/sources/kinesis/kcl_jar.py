"""The KCL's own AggregatorUtil, run from its published jar, as the reference for the contents of aggregates."""

import base64
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

KclRecord = tuple[str, str | None, bytes, int, bool]
"""Partition key, explicit hash key, data, sub-sequence number, and whether the record was in an aggregate."""

_HERE = Path(__file__).resolve()
_PROGRAM = _HERE.parents[2] / "java" / "deaggregate"
_JARS = _HERE.parents[3] / ".local" / "java" / "deaggregate"


def missing() -> str:
    """Return the names of the missing tools that are needed to run the jar, or an empty string."""
    return ", ".join(tool for tool in ("java", "mvn") if shutil.which(tool) is None)


def jars() -> Path:
    """Return the folder of the jars. The first call downloads the jars."""
    if not (_JARS / "complete").exists():
        fetch = ["mvn", "-q", "-B", "-f", str(_PROGRAM / "pom.xml"), "dependency:copy-dependencies"]
        subprocess.run([*fetch, f"-DoutputDirectory={_JARS}"], check=True, timeout=280)
        (_JARS / "complete").touch()
    return _JARS


def kcl_records(aggregates_with_ranges: Iterable[tuple[bytes, int, int]]) -> list[tuple[KclRecord, ...]]:
    """Return the user records that the KCL dispatches for each aggregate, given as (data, first and last hash key)."""
    lines = [f"{base64.b64encode(data).decode()} {first} {last}" for data, first, last in aggregates_with_ranges]
    command = ["java", "-cp", f"{jars()}{os.sep}*", str(_PROGRAM / "Deaggregate.java")]
    completed = subprocess.run(
        command, input="\n".join(lines), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    response_lines = completed.stdout.removesuffix("\n").split("\n")
    return [tuple(_parse_record(field) for field in response_line.split()) for response_line in response_lines]


def _parse_record(field: str) -> KclRecord:
    aggregated, sub, key, hash_key, data = field.split(",")
    explicit_hash_key = None if hash_key == "-" else base64.b64decode(hash_key).decode()
    return base64.b64decode(key).decode(), explicit_hash_key, base64.b64decode(data), int(sub), aggregated == "true"
