"""`leasehold deaggregate`: Kinesis records in, their user records out, and why any were dropped."""

import base64
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.sources.kinesis.aggregation.decode import (
    MalformedAggregate,
    Misplaced,
    UserRecords,
    deaggregate,
)
from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED
from leasehold.balancer.model import HASH_KEYS, HashRange
from leasehold.stores.fields import decimal, encodable

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
One JSON object a line, in and out. In: `data` (base64) and, if you have them, `partition_key` and
`sequence_number`. Out: `data`, `partition_key`, `explicit_hash_key`, `sequence_number`,
`sub_sequence_number`, `aggregated`. What was dropped, and why, is said on stderr at the end:

`plain` and `bad-md5`, `bad-proto`: passed on as they came · `bad-index`, `bad-hash-key`: kept up to the
broken user record · `out-of-range`: the user records outside the hash range are dropped, with `--misplaced drop`
all of them, as KCL does · `empty`: there was nothing in it.

Exit status: 0, or 2 on bad usage, on a line that cannot be read, and with `--strict` on a malformed aggregate.
"""


@app.command(help="Take Kinesis records apart into their user records, as a worker does.", epilog=MORE)
def command(
    file: Annotated[Path | None, typer.Argument(help="JSON lines; without it, standard input.")] = None,
    hash_range: Annotated[tuple[str, str] | None, typer.Option(help="The shard's first and last hash key.")] = None,
    misplaced: Annotated[
        Misplaced, typer.Option(help="What is done with the user records inside the hash range where others are not.")
    ] = "keep",
    strict: Annotated[bool, typer.Option("--strict", help="A malformed aggregate is an error.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Say the summary as JSON too.")] = False,
) -> None:
    """Read every line, print every user record, then say what was dropped."""
    records, dropped = Counter[str](), Counter[str]()
    with ending("deaggregate", misuse=(ValueError, OSError)):
        within = _range(hash_range)
        with file.open() if file else sys.stdin as lines:
            for number, line in enumerate(lines, 1):
                answer = _print(number, line, within, misplaced, strict=strict)
                records[answer.reason] += 1
                dropped[answer.reason] += answer.dropped
    print(_summary(records, +dropped, as_json=json_), file=sys.stderr)


def _range(given: tuple[str, str] | None) -> HashRange | None:
    if given is None:
        return None
    first, last = (decimal(key, HASH_KEYS[1]) for key in given)
    if first is None or last is None:
        raise ValueError("--hash-range: wants two decimal numbers from 0 to 2**128 - 1")
    if first > last:
        raise ValueError("--hash-range: the first hash key is above the last")
    return first, last


def _print(number: int, line: str, within: HashRange | None, misplaced: Misplaced, *, strict: bool) -> UserRecords:
    row = _row(number, line)
    keys = row.get("partition_key"), row.get("explicit_hash_key")
    try:
        answer = deaggregate(row["data"], *keys, within, misplaced=misplaced, strict=strict)
    except MalformedAggregate as error:
        raise ValueError(f"line {number}: {error}") from None
    for out in _rows(answer, row.get("sequence_number")):
        print(json.dumps(out, ensure_ascii=False))
    return answer


def _rows(answer: UserRecords, sequence_number: str | None) -> Iterator[dict[str, Any]]:
    for user in answer:
        yield {
            "data": base64.b64encode(user.data).decode(),
            "partition_key": user.partition_key,
            "explicit_hash_key": user.explicit_hash_key,
            "sequence_number": sequence_number,
            "sub_sequence_number": user.sub_sequence_number,
            "aggregated": answer.aggregated,
        }


def _row(number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"line {number}: not JSON; write one object a line") from None
    if not isinstance(row, dict) or not isinstance(row.get("data"), str):
        raise ValueError(f"line {number}: data: wants an object with the record's data in base64")  # noqa: TRY004  a user's
    for name in ("partition_key", "explicit_hash_key", "sequence_number"):
        if not _text_or_none(row.get(name)):
            raise ValueError(f"line {number}: {name}: wants a text")
    try:
        return row | {"data": base64.b64decode(row["data"], validate=True)}
    except ValueError:
        raise ValueError(f"line {number}: data: not base64") from None


def _text_or_none(found: object) -> bool:
    """Whether it can be written again: JSON can say halves of characters, and no output takes those."""
    return found is None or (isinstance(found, str) and encodable(found) == found)


def _summary(records: Counter[str], dropped: Counter[str], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({"records": records, "dropped": dropped, "compiled": COMPILED})
    read = ", ".join(f"{count} {reason}" for reason, count in sorted(records.items())) or "none"
    lost = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
    by = "" if COMPILED else " Read by plain Python, which is slow: this leasehold is not compiled."
    return f"Kinesis records: {read}. User records dropped: {lost}.{by}"
