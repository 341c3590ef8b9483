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

from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.consumer.dead_letters.replaying import (
    CallHandler,
    DeadLetterSource,
    HandlerCaller,
    ReplayVerdict,
    replay,
    replay_stream,
)
from leasehold.adapters.consumer.dead_letters.sinks import open_dead_letters, open_stream
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.slices import exclusive_table
from leasehold.adapters.consuming import load_function
from leasehold.adapters.inputs import parse_initial_position
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON
from leasehold.errors import DeadLetterError, SourceError, StoreError, WorkerError
from leasehold.stores.printable import printable_lines
from leasehold.stores.urls import open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
LETTERS is where `leasehold consume --dead-letter` has put the dead letters: `file://folder`,
`s3://bucket/prefix?region=…`, `kinesis://stream?region=…`.

Dead letters are processed one at a time, in the order of their sequence numbers: a handler gets batches of one record,
or the records are put back into a stream with their original keys. A dead letter is removed only once its handler is
done, or the stream has acknowledged it. If its handler fails again, or it cannot be read, it stays, its name is
printed, and the next one follows. If the stream accepts no more records, the replay ends, to preserve the order. If the
command is killed, run it again for the remaining ones; the dead letter in progress is then processed once more. Run one
replay at a time.

Dead letters in a stream cannot be removed. `--store` names a lease table for the replay alone, whose checkpoints show
what is done: the next replay with that table begins after them, the first one at `--from`. A dead letter whose handler
fails again is put back at the end of the stream for the next replay, with the attempt counted. A record that is no dead
letter is reported and skipped. The dead letters of each shard come in the order in which they were put. The replay ends
when all dead letters that existed at its start are done.

In its batch, a handler finds the lease, shard and stream of the record. `attempts` continues to count, `epoch` is None,
`lost` is False, and `checkpoint()` does nothing.

Exit status: 0 if every dead letter is done; 1 if any stays, or they cannot be listed; 2 on bad usage.
"""

FOLDER_LABELS = "processed and removed", "stay"
STREAM_LABELS = "processed", "were put back at the end"
"""Labels for dead letters that were handled, and for those that failed again. The first pair is for a folder or bucket,
the second for a stream."""


@app.command(help="Process dead letters again, in order; those that fail again stay.", epilog=EPILOG)
def command(  # noqa: PLR0917  one for each option
    dead_letters: Annotated[str, typer.Argument(help="Read the dead letters here, a URL.", show_default=False)],
    handler: Annotated[str | None, typer.Option(help="Call module:function with each record.")] = None,
    to: Annotated[str | None, typer.Option(help="Put the records back into this stream: kinesis://….")] = None,
    store: Annotated[
        str | None, typer.Option(help="Keep the replay's leases here, for dead letters in a stream.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--from", help="Start shards without a lease at TRIM_HORIZON or a time."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Dispatch or put back every dead letter, and print the result."""
    with exit_on_failure("replay", DeadLetterError, WorkerError, StoreError, SourceError):
        if (handler is None) == (to is None):
            raise ValueError("choose one of --handler module:function and --to kinesis://…")
        if store is None:
            dead_letter_sink = open_dead_letters(dead_letters)
            if since is not None:
                raise ValueError("--from: it is only for dead letters in a stream")
            with _open_delivery(handler, to) as call_handler:
                verdict = replay(dead_letter_sink, call_handler, _print_failure)
        else:
            verdict = _replay_from_stream(dead_letters, store, since, handler, to)
    if as_json:
        print(json.dumps(asdict(verdict)))
    else:
        done_label, failed_label = FOLDER_LABELS if store is None else STREAM_LABELS
        letter_count = verdict.done + verdict.failed + verdict.strange
        count_text = "1 dead letter" if letter_count == 1 else f"{letter_count} dead letters"
        unreadable_note = f", {verdict.strange} are no dead letters, or cannot be read" if verdict.strange else ""
        print(
            f"{count_text}: {verdict.done} {done_label}, "
            f"{verdict.failed} failed again and {failed_label}{unreadable_note}"
        )
    if verdict.failed or verdict.strange:
        raise typer.Exit(1)


def _replay_from_stream(
    dead_letters_url: str,
    store_url: str,
    start_text: str | None,
    handler_name: str | None,
    target_stream_url: str | None,
) -> ReplayVerdict:
    start_position = TRIM_HORIZON if start_text is None else parse_initial_position(start_text, time.time(), "--from")
    stream_url = dead_letters_url.partition("?")[0]
    if not stream_url.startswith("kinesis://"):
        raise ValueError("--store: it is only for dead letters in a stream, kinesis://…")
    if start_position == LATEST:
        raise ValueError("--from: a replay begins at TRIM_HORIZON or at a time")
    if target_stream_url is not None and target_stream_url.partition("?")[0] == stream_url:
        raise ValueError("--to: the dead letters are in this stream; name another")
    worker_id = f"replay-{uuid4().hex[:12]}"
    with (
        _open_delivery(handler_name, target_stream_url) as call_handler,
        closing(open_stream(dead_letters_url)) as sink,
        closing(open_source(dead_letters_url)) as source,
        closing(open_store(store_url)) as table,
    ):
        own_store, letter_source = (
            exclusive_table(table, "replay", f"replay of {stream_url}"),
            DeadLetterSource(source, worker_id),
        )
        worker = Worker(
            store=own_store, source=letter_source, me=worker_id, config=Config(initial_position=start_position)
        )
        return replay_stream(worker, sink, call_handler, _print_failure)


@contextmanager
def _open_delivery(handler_name: str | None, target_stream_url: str | None) -> Iterator[CallHandler]:
    if target_stream_url is not None:
        stream = open_stream(target_stream_url)
        with closing(stream):
            yield stream.put_back
        return
    # Create a `Handling`, which checks the handler in the same way as for `consume`.
    with HandlerCaller(Handling(load_function(handler_name or "")).handler) as handler_caller:
        yield handler_caller.deliver


def _print_failure(name: str, reason: str) -> None:
    print(printable_lines(f"leasehold replay: {name} stays: {reason}"), file=sys.stderr)
