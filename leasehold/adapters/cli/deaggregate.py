"""`leasehold deaggregate`: extracts the user records of Kinesis records, and reports how many were dropped and why."""

import base64
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.sources.kinesis.aggregation.decode import (
    MalformedAggregate,
    Misplaced,
    UserRecords,
    deaggregate,
)
from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED
from leasehold.balancer.model import HASH_KEYS, HashRange
from leasehold.stores.fields import escape_surrogates, parse_decimal

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
Input and output have one JSON object per line. Input: `data` (base64) and, if you have them, `partition_key` and
`sequence_number`. Output: `data`, `partition_key`, `explicit_hash_key`, `sequence_number`, `sub_sequence_number`,
`aggregated`. At the end, standard error shows which records were dropped, and why:

`plain` and `bad-md5`, `bad-proto`: passed on unchanged · `bad-index`, `bad-hash-key`: kept up to the broken user
record · `out-of-range`: the user records outside the hash range are dropped, or with `--misplaced drop` all of them, as
in the KCL · `empty`: the aggregate contains no user records.

Exit status: 0, or 2 on bad usage, on a line that cannot be read, and with `--strict` on a malformed aggregate.
"""


@app.command(help="Extract the user records of Kinesis records, as a worker does.", epilog=EPILOG)
def command(
    file: Annotated[Path | None, typer.Argument(help="Read JSON lines from this file, or from standard input.")] = None,
    hash_range: Annotated[
        tuple[str, str] | None, typer.Option(help="Filter by the shard's first and last hash key.")
    ] = None,
    misplaced: Annotated[
        Misplaced,
        typer.Option(help="Keep or drop records in the range if others of their aggregate are not."),
    ] = "keep",
    strict: Annotated[bool, typer.Option("--strict", help="Treat a malformed aggregate as an error.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, too.")] = False,
) -> None:
    """Print the user records of every line, then report what was dropped."""
    record_counts, dropped_by_reason = Counter[str](), Counter[str]()
    with exit_on_failure("deaggregate", misuse=(ValueError, OSError)):
        filter_range: HashRange | None = None
        if hash_range is not None:
            first_hash_key, last_hash_key = (parse_decimal(key, HASH_KEYS[1]) for key in hash_range)
            if first_hash_key is None or last_hash_key is None:
                raise ValueError("--hash-range: needs two decimal numbers from 0 to 2**128 - 1")
            if first_hash_key > last_hash_key:
                raise ValueError("--hash-range: the first hash key is above the last")
            filter_range = first_hash_key, last_hash_key
        with file.open() if file else sys.stdin as lines:
            for number, line in enumerate(lines, 1):
                user_records = _print_user_records(number, line, filter_range, misplaced, strict=strict)
                record_counts[user_records.reason] += 1
                dropped_by_reason[user_records.reason] += user_records.dropped
    dropped_counts = +dropped_by_reason
    if json_:
        print(json.dumps({"records": record_counts, "dropped": dropped_counts, "compiled": COMPILED}), file=sys.stderr)
        return
    count_texts = (
        ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        for reasons in (record_counts, dropped_counts)
    )
    speed_note = "" if COMPILED else " Read by plain Python, which is slow: this leasehold is not compiled."
    records_text, dropped_text = (count or "none" for count in count_texts)
    print(f"Kinesis records: {records_text}. User records dropped: {dropped_text}.{speed_note}", file=sys.stderr)


def _print_user_records(
    number: int, line: str, filter_range: HashRange | None, misplaced: Misplaced, *, strict: bool
) -> UserRecords:
    """Print the user records of one line, and return them. Raises ValueError, naming the line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"line {number}: not JSON; write one object per line") from None
    if not isinstance(row, dict) or not isinstance(row.get("data"), str):
        raise ValueError(f"line {number}: data: needs an object with the record's data in base64")  # noqa: TRY004  the user's mistake
    for name in ("partition_key", "explicit_hash_key", "sequence_number"):
        field_value = row.get(name)
        # JSON may contain lone surrogates, which cannot be encoded.
        if field_value is not None and not (
            isinstance(field_value, str) and escape_surrogates(field_value) == field_value
        ):
            raise ValueError(f"line {number}: {name}: needs a string")
    try:
        record_data = base64.b64decode(row["data"], validate=True)
    except ValueError:
        raise ValueError(f"line {number}: data: not base64") from None
    record_keys = row.get("partition_key"), row.get("explicit_hash_key")
    try:
        user_records = deaggregate(record_data, *record_keys, filter_range, misplaced=misplaced, strict=strict)
    except MalformedAggregate as error:
        raise ValueError(f"line {number}: {error}") from None
    for user_record in user_records:
        document = {
            "data": base64.b64encode(user_record.data).decode(),
            "partition_key": user_record.partition_key,
            "explicit_hash_key": user_record.explicit_hash_key,
            "sequence_number": row.get("sequence_number"),
            "sub_sequence_number": user_record.sub_sequence_number,
            "aggregated": user_records.aggregated,
        }
        print(json.dumps(document, ensure_ascii=False))
    return user_records
