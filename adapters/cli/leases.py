"""`leasehold leases`: who holds what, and how far they are."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import chain
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.live import Live

from adapters.cli.lease_tables import Reading, page
from adapters.lease_json import lease_json
from balancer.watch import Watch
from stores.protocol import OutcomeUnknown, Store, StoreError
from stores.urls import open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
STORE is a URL: `dynamodb://table?region=…`, `sqlite:///path`, `azblob://account/container`, `s3://bucket/prefix`.
Nothing is written, and nothing is made.

`idle` is for how long a lease has stood still. A single look knows that only where the store keeps each row's
age; with `--watch` it is also counted from the first look on, until Ctrl-C.

`--by worker` and `--by group` count unfinished leases; a worker's group is the text before the last "-" of its id.

`--json` prints one object (with `--watch` one line for each look), whose leases `leasehold plan` can read, and
which `leasehold report` makes a page of; `at` is the time, in seconds since 1970.
"""


class By(StrEnum):
    """What one row of the table stands for, if not one lease."""

    GROUP = "group"
    WORKER = "worker"


def readings(store: Store, seconds: float, wait: Callable[[float], object] = time.sleep) -> Iterator[Reading]:
    """One reading after another; where one fails, the last again, with the trouble."""
    watch, shown = Watch(), Reading(())
    while True:
        began = time.monotonic()
        try:
            listing = store.list()
        except OutcomeUnknown as error:
            yield Reading(shown.leases, shown.malformed, str(error))
        else:
            watch, leases = watch.look(listing.leases, began, time.monotonic())
            shown = Reading(leases, listing.malformed)
            yield shown
        wait(seconds)


@app.command(help="Show who holds what, and how far they are.", epilog=MORE)
def command(
    store: Annotated[str, typer.Argument(help="Where the leases are, as a URL.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    by: Annotated[By | None, typer.Option(help="One row for each worker or group.")] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look once, or keep watching."""
    try:
        opened = open_store(store, create=False)
    except ValueError as error:
        raise _ended(error, 2) from None
    except StoreError as error:
        raise _ended(error, 1) from None
    try:
        _show(readings(opened, every), by, watch=watch, as_json=as_json)
    except StoreError as error:
        raise _ended(error, 1) from None
    except KeyboardInterrupt:
        pass  # the way to end a watch
    finally:
        opened.close()


def _show(looks: Iterator[Reading], by: By | None, *, watch: bool, as_json: bool) -> None:
    first = next(looks)
    if first.trouble and not watch:
        raise OutcomeUnknown(first.trouble)
    if as_json:
        for reading in chain((first,), looks if watch else ()):
            _print_json(reading)
    elif watch:
        with Live(page(first, by), auto_refresh=False) as live:
            for reading in looks:
                live.update(page(reading, by), refresh=True)
    else:
        Console().print(page(first, by))


def _print_json(reading: Reading) -> None:
    leases = [lease_json(lease) for lease in sorted(reading.leases, key=lambda lease: lease.key)]
    malformed = [asdict(row) for row in reading.malformed]
    trouble = {"trouble": reading.trouble} if reading.trouble else {}
    print(json.dumps({"at": round(time.time(), 3), "leases": leases, "malformed": malformed, **trouble}), flush=True)


def _ended(error: Exception, status: int) -> typer.Exit:
    print(f"leasehold leases: {error}", file=sys.stderr)
    return typer.Exit(status)
