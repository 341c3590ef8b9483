"""`leasehold consume`: runs one or more workers of a fleet from the command line."""

import logging
import sys
from typing import Annotated, Literal, Unpack

import typer

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.cli.common.standard_streams import drop_output
from leasehold.adapters.cli.common.start_lines import start_lines
from leasehold.adapters.cli.common.supervisor import Supervisor, at_end_of_supervisor
from leasehold.adapters.cli.common.table_options import table_options
from leasehold.adapters.consumer.events import CLOSED_STATUS, EventLines, JsonLines
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.runner import termination_signals
from leasehold.adapters.consuming import Consumption, consumption, worker_id
from leasehold.adapters.inputs import dashed
from leasehold.adapters.options import Options
from leasehold.errors import DeadLetterError, SourceError, StoreError, WorkerError
from leasehold.stores.urls import store_address

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
SOURCE is a URL: `kinesis://stream?region=…`. All workers that name the same source and store share its
shards. SIGTERM, SIGHUP (not under nohup) or Ctrl-C finishes the running batches, checkpoints and releases, within
`--drain-seconds`; what is not released by then expires. A second one ends at once.

A handler is a function of one batch (`records`, `lease`, `shard`, `epoch`, `lost`, `checkpoint()`), plain or async;
when it returns None, the batch is done, and the next checkpoint covers it (`--checkpoint-seconds`). When it raises,
or returns anything else, the batch is handed over again after a growing wait, up to `--attempts`; then its shard stops
here, says so, and its lease is released for another worker to try. Nothing is skipped, unless `--dead-letter` takes it:
then the batch is handed over in halves, in order and without waits, until the records that fail are found; these alone
go to the dead letter, and the shard goes on. `leasehold replay` hands them over again. A letter that cannot be written
stops the shard. A handler at work for longer than a minute is said; beyond `--handler-seconds` its lease is released
likewise.

`--handler lambda:app.handler` calls an AWS Lambda function with the events of an event source mapping, one call at a
time; `lambda:app.handler?report_batch_item_failures=true` reads its response, too. Batches have up to 100 records
unless `--max-records` says otherwise. `--concurrency N` calls it for up to N parts of a batch at a time, each with its
own keys and in a process of its own.

Seconds can be written as durations: `90`, `1.5s`, `5m`, `2h`, `1d12h`, `PT2H`. `--from` is where reading begins on a
shard whose lease is new; `leasehold reset` moves the checkpoint of one that is there. Where the stream or the store
does not answer, a worker goes on trying until it is told to end, and says so; with `--no-wait` it ends with status 1
if they do not answer at the start.

`--to` names the store to which `leasehold swap` moves the leases while the workers read; until then they stay where
they are. Every worker of the fleet needs it before the swap begins.

With `--until` the workers read a slice: what arrived from `--from` (a time, or TRIM_HORIZON) up to that time. Its
leases want a store of their own, which all workers of the slice name with the same two times; `now` means another time
to each of them. A shard is finished when all that arrived in time is handled, and so are the children of those closed
within the slice. Each worker ends once the whole slice is read, and says how much of it was its own; one that is killed
is started again with the same times, and goes on. Event hubs: name a consumer group of the slice's own.

`--log json` writes an object a line to standard error: `at`, `level`, `logger`, `worker`, `message`, and where they
apply `lease`, `rule` (the numbered rule that asked) and `outcome` (done, refused, unknown: what the store made of it);
with `--verbose` one for each lease that is created, taken or asked for.

`--processes N` runs N workers here, as a thread of Python uses one processor: its interpreter has one lock. They are
ID-0 to ID-(N-1), of the ID given as `--worker`, also after a restart; each has its own `--memory-mib`. A signal drains
them together. One that ends by itself is started again, after a pause that grows from 1 s to 60 s; ending with status
2 or 141, or with `--no-wait` 1, it ends them all. One that has not ended 5 s after `--drain-seconds` is killed, and the
status is 1.

Exit status: 0 after a drain, or when the slice is read; 1 when the worker could not go on, or was told to end before
the slice was read; 2 on bad usage; 141 when the reader of `--events` has gone; a handler that raises SystemExit ends
the worker with its own.
"""


LogForm = Literal["text", "json"]


@app.command(help="Join a group of workers and process this worker's shards.", epilog=MORE)
@table_options()
def command(
    source: Annotated[str, typer.Argument(help="Read this stream, a URL.", show_default=False)],
    store: Annotated[str, typer.Option(help="Keep the leases here, a URL.", show_default=False)],
    handler: Annotated[
        str | None, typer.Option(help="Call module:function, or lambda:file.function, with each batch.")
    ] = None,
    *,
    events: Annotated[bool, typer.Option("--events", "--json", help="Print a JSON line for each event.")] = False,
    processes: Annotated[int, typer.Option(help="Run this many workers, each in a process of its own.")] = 1,
    log: Annotated[LogForm, typer.Option(help="Write lines to standard error as text or JSON.")] = "text",
    verbose: Annotated[bool, typer.Option(help="Log every lease that is taken or released.")] = False,
    **options: Unpack[Options],
) -> None:
    """Run one or more workers until they are stopped."""
    me = options["worker"] = worker_id() if options["worker"] is None else options["worker"]
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log == "json":
        for log_handler in logging.getLogger().handlers:
            log_handler.setFormatter(JsonLines(me))
    logging.getLogger("leasehold").setLevel(logging.INFO if verbose else logging.WARNING)
    with ending("consume", StoreError, SourceError, DeadLetterError, WorkerError):
        chosen_handler = _handler(handler, me, options, events=events)
        if events and sys.__stdout__ is None:
            print("leasehold consume: standard output is closed, so no one can read the events", file=sys.stderr)
            raise typer.Exit(CLOSED_STATUS)
        described = consumption(source, store, chosen_handler, options, dashed)
        if processes < 1:
            raise ValueError(f"--processes: {processes} is not a whole number above 0")
        if processes > 1:
            raise typer.Exit(_run_supervised(me, store, processes, described))
        with described.opened() as worker, start_lines(worker, source, store):
            verdict = described.run(worker, begun=lambda runner: at_end_of_supervisor(runner.stop))
    if verdict is not None:
        summary = f"handled here: {verdict.records} records, and {verdict.shards} of its shards to their end"
        letters_note = f", {verdict.letters} went to the dead letter" if verdict.letters else ""
        state = "the slice is read" if verdict.finished else "the slice is not read to its end: start again to go on"
        print(f"{state}; {summary}{letters_note}", file=sys.stderr if events else sys.stdout)
        raise typer.Exit(0 if verdict.finished else 1)


def _handler(handler: str | None, me: str, options: Options, *, events: bool) -> str | Handling:
    if events == (handler is not None):
        raise ValueError("choose one of --handler module:function and --events")
    if handler is not None:
        drop_output()
        return handler
    for name in ("concurrency", "linger_seconds"):
        if options.get(name):  # 0 is the default
            raise ValueError(f"{dashed(name)}: it goes with --handler")
    return EventLines(me, sys.stdout).handling


def _run_supervised(me: str, store: str, processes: int, described: Consumption) -> int:
    """Run this command as several processes, and return the exit status.

    Raises ValueError if they cannot share the leases.
    """
    if store_address(store)[0] == "memory":
        raise ValueError("--processes: they cannot share memory://, which is of one process; sqlite:// would do")
    if described.cut is not None:
        raise ValueError("--processes: a slice ends by itself, and they would be started again; start several commands")
    arguments = sys.argv[1:]  # if an option is repeated, the last one counts
    options = arguments.index("--") if "--" in arguments else len(arguments)
    commands = {}
    for name in (f"{me}-{number}" for number in range(processes)):
        words = (*arguments[:options], "--worker", name, "--processes", "1", *arguments[options:])
        commands[name] = (sys.executable, "-P", "-c", "from leasehold.adapters.cli import run; run()", *words)
    final = {2, CLOSED_STATUS} | (set() if described.options["wait"] else {1})
    return Supervisor(commands, described.options["drain_seconds"], final).run(termination_signals())
