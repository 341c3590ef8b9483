"""`leasehold replay`: dispatches dead letters to a handler again, or puts them back into a stream."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated
from uuid import uuid4

import typer
from attrs import asdict

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.consumer.dead_letters.replaying import (
    DeadLetterSource,
    Deliver,
    HandlerCalls,
    ReplayVerdict,
    replay,
    replay_stream,
)
from leasehold.adapters.consumer.dead_letters.sinks import open_dead_letters, open_stream
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.slices import own_table
from leasehold.adapters.consuming import load
from leasehold.adapters.inputs import start
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON
from leasehold.errors import DeadLetterError, SourceError, StoreError, WorkerError
from leasehold.stores.printable import printable_lines
from leasehold.stores.urls import open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
LETTERS is where `leasehold consume --dead-letter` has put them: `file://folder`, `s3://bucket/prefix?region=…`,
`kinesis://stream?region=…`.

The letters are handed over one at a time, in the order of their sequence numbers: to a handler, as batches of one
record, or back into a stream, with the keys that they had. A letter is removed only once its handler is done, or the
stream has acknowledged it; one whose handler fails again, or that cannot be read, stays, is said by its name, and the
next one follows. A stream that takes a record no more ends the replay, for the sake of order. Where this is killed,
running it again does the rest: the letter at work then comes once more. Run one at a time.

Letters in a stream cannot be removed. `--store` names a lease table of the replay's own, whose checkpoints say what is
done: the next replay with that table begins behind it, the first one at `--from`. One whose handler fails again is put
back at the end of the stream, with the attempt counted, for the next replay; what is no letter is said and passed. Each
shard's letters come in the order in which they were put. It ends by itself when all is done that was there.

A handler finds in its batch the lease, shard and stream of the record, `attempts` counted on, `epoch` None, and
`lost` False; `checkpoint()` does nothing.

Exit status: 0 if every letter is done; 1 if any stays, or they cannot be listed; 2 on bad usage.
"""

FOLDER = "handed over and removed", "stay"
STREAM = "handed over", "are put back at the end"
"""Labels for dead letters that were handled, and for those that failed again."""


@app.command(help="Hand dead letters over again, in order; those that fail again stay.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    dead_letters: Annotated[str, typer.Argument(help="Read the dead letters here, a URL.", show_default=False)],
    handler: Annotated[str | None, typer.Option(help="Call module:function with each record.")] = None,
    to: Annotated[str | None, typer.Option(help="Put the records back into this stream: kinesis://….")] = None,
    store: Annotated[
        str | None, typer.Option(help="Keep the replay's own leases here; for letters in a stream.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--from", help="Start shards of letters without a lease at TRIM_HORIZON or a time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Dispatch or put back every dead letter, and print the result."""
    with ending("replay", DeadLetterError, WorkerError, StoreError, SourceError):
        if (handler is None) == (to is None):
            raise ValueError("choose one of --handler module:function and --to kinesis://…")
        if store is None:
            sink = open_dead_letters(dead_letters)
            if since is not None:
                raise ValueError("--from: it goes with letters in a stream")
            with _open_delivery(handler, to) as deliver:
                verdict = replay(sink, deliver, _print_failure)
        else:
            verdict = _in_stream(dead_letters, store, since, handler, to)
    if as_json:
        print(json.dumps(asdict(verdict)))
    else:
        done_label, failed_label = FOLDER if store is None else STREAM
        count = verdict.done + verdict.failed + verdict.strange
        count_text = "1 letter" if count == 1 else f"{count} letters"
        strange = f", {verdict.strange} are no letters, or cannot be read" if verdict.strange else ""
        print(f"{count_text}: {verdict.done} {done_label}, {verdict.failed} failed again and {failed_label}{strange}")
    if verdict.failed or verdict.strange:
        raise typer.Exit(1)


def _in_stream(dead_letters: str, store: str, since: str | None, handler: str | None, to: str | None) -> ReplayVerdict:
    begin = TRIM_HORIZON if since is None else start(since, time.time(), "--from")
    place = dead_letters.partition("?")[0]
    if not place.startswith("kinesis://"):
        raise ValueError("--store: it goes with letters in a stream, kinesis://…")
    if begin == LATEST:
        raise ValueError("--from: a replay begins at TRIM_HORIZON or at a time")
    if to is not None and to.partition("?")[0] == place:
        raise ValueError("--to: it is the stream that the letters are in")
    me = f"replay-{uuid4().hex[:12]}"
    with (
        _open_delivery(handler, to) as deliver,
        closing(open_stream(dead_letters)) as sink,
        closing(open_source(dead_letters)) as source,
        closing(open_store(store)) as table,
    ):
        own_store, letters = own_table(table, "replay", f"replay of {place}"), DeadLetterSource(source, me)
        worker = Worker(store=own_store, source=letters, me=me, config=Config(initial_position=begin))
        return replay_stream(worker, sink, deliver, _print_failure)


@contextmanager
def _open_delivery(handler: str | None, to: str | None) -> Iterator[Deliver]:
    if to is not None:
        stream = open_stream(to)
        with closing(stream):
            yield stream.put_back
        return
    # Use `Handling` for the same checks as for a handler of `consume`.
    with HandlerCalls(Handling(load(handler or "")).handler) as calls:
        yield calls.deliver


def _print_failure(name: str, why: str) -> None:
    print(printable_lines(f"leasehold replay: {name} stays: {why}"), file=sys.stderr)
