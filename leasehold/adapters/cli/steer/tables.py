"""`leasehold tables`: shows the lease tables at a place, with their owners, age and layout."""

import json
import time
from typing import Annotated

import typer
from attrs import asdict

from leasehold.adapters.cli.common.asking import AsJson
from leasehold.adapters.cli.common.columns import Cells, Column, show
from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.ops.tables import tables_at
from leasehold.errors import StoreError

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
A PLACE is the URL of a store without its table: `dynamodb://?region=…` (all of an account and region),
`postgres://host/database`, `s3://bucket`, `gcs://bucket`, `azblob://account/container`; with more of the URL it is a
part of that, or one table. `sqlite:///path` and `file:///path` are one table each. Several may be named.

Nothing is written. Tables are told by their keys, columns or the names of their objects; then each is listed once, at
the price of a look. A table of DynamoDB that many applications share is read whole to find their prefixes.

What a service does not tell is `-` (`null` with `--json`): DynamoDB does not say when a table was last written, objects
do not say when a table was made. `protected` and `recoverable` are DynamoDB's deletion protection and point-in-time
recovery. A lease table of the layout of Azure's SDKs is one per hub and group. A table that takes, or took, part in a
swap says so.

Exit status: 0, 1 if a place or a table could not be read (the others are told), 2 on bad usage.
"""


@app.command(help="Show which lease tables there are, whose, how old, and in which layout.", epilog=MORE)
def command(
    place: Annotated[list[str], typer.Argument(metavar="PLACE...", help="Where to look, as URLs.", show_default=False)],
    wide: Annotated[bool, typer.Option("--wide", help="Show every column, a table a line.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find, list, tell."""
    with ending("tables", StoreError):
        listed = [table for url in place for table in tables_at(url)]
        if as_json:
            print(json.dumps({"at": round(time.time(), 3), "tables": [asdict(table) for table in listed]}))
        else:
            unread = "{} rows cannot be read (leasehold leases says which)"
            rows = tuple(
                (
                    table.url,
                    table.layout,
                    _said(table.leases),
                    _said(table.ended),
                    _said(None if table.leases is None else len(table.owners)),
                    ", ".join(table.streams),
                    _day(table.created),
                    _day(table.written),
                    _said(table.protected),
                    _said(table.recoverable),
                    "; ".join(
                        filter(
                            None, (table.why, unread.format(table.malformed) if table.malformed else "", *table.swap)
                        )
                    ),
                )
                for table in listed
            )
            show(Cells(_COLUMNS, rows, f"{len(listed)} lease tables"), wide=wide)
        raise typer.Exit(1 if any(table.why for table in listed) else 0)


_COLUMNS = (
    Column("table"),
    Column("layout", spare=1),
    Column("leases", right=True),
    Column("ended", right=True, spare=6),
    Column("owners", right=True),
    Column("streams", spare=5),
    Column("created", spare=4),
    Column("written", spare=2),
    Column("protected", spare=7),
    Column("recoverable", spare=7),
    Column("remark", words=True),
)


def _said(fact: int | bool | None) -> str:
    words: dict[int | None, str] = {None: ""}
    return "yes" if fact is True else "no" if fact is False else words.get(fact, str(fact))


def _day(moment: float | None) -> str:
    return "" if moment is None else time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(moment))
