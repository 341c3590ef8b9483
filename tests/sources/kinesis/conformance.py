"""Writes conformance.jsonl: for every crafted case, the records that the KCL's jar returns.

After adding a case, run `python tests/sources/kinesis/conformance.py`.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kcl_jar
from aggregates import text
from crafted import Case, cases

TABLE = Path(__file__).with_name("conformance.jsonl")


def read() -> Iterator[tuple[Case, tuple[kcl_jar.KclRecord, ...]]]:
    """Yield each stored case, with the records that the KCL keeps of it."""
    for line in TABLE.read_text().splitlines():
        row = json.loads(line)
        kept_records = tuple(
            (key, hash_key, base64.b64decode(data), sub, aggregated)
            for key, hash_key, data, sub, aggregated in row.pop("kept")
        )
        data = base64.b64decode(row.pop("data"))
        yield Case(data=data, first=int(row.pop("first")), last=int(row.pop("last")), **row), kept_records


def _row(case: Case, kept_records: tuple[kcl_jar.KclRecord, ...]) -> dict[str, Any]:
    return {
        "name": case.name,
        "data": text(case.data),
        "first": str(case.first),
        "last": str(case.last),
        "reason": case.reason,
        "dropped": case.dropped,
        "kept": [[key, hash_key, text(data), sub, aggregated] for key, hash_key, data, sub, aggregated in kept_records],
    }


def write() -> int:
    """Run every crafted case through the jar, write the results, and return the number of cases."""
    crafted_cases = tuple(cases())
    kcl_results = kcl_jar.kcl_records((case.data, case.first, case.last) for case in crafted_cases)
    rows = [_row(case, kept_records) for case, kept_records in zip(crafted_cases, kcl_results, strict=True)]
    TABLE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


if __name__ == "__main__":
    print(write(), "cases")  # noqa: T201  a script prints its result
