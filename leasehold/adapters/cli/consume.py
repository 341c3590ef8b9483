"""`leasehold consume`: runs one or more workers of a fleet from the command line."""

import logging
import sys
from typing import Annotated, Literal, Unpack

import typer

from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.standard_streams import discard_if_output_closed
from leasehold.adapters.cli.common.start_lines import print_start_lines
from leasehold.adapters.cli.common.supervisor import Supervisor, call_at_end_of_supervisor
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.consumer.events import CLOSED_PIPE_STATUS, EventLines, JsonLines
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.runner import termination_signals
from leasehold.adapters.consuming import Consumption, check_consumption_options, make_worker_id
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.options import Options
from leasehold.errors import DeadLetterError, SourceError, StoreError, WorkerError
from leasehold.stores.urls import split_store_url

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
SOURCE is a URL: `kinesis://stream?region=…`. All workers that name the same source and store share its shards.

SIGTERM, SIGHUP (not under nohup) or Ctrl-C drains the worker: it finishes the running batches, writes checkpoints and
releases its leases, within `--drain-seconds`. Leases that are not released by then expire. A second signal ends the
worker at once.

A handler is a function of one batch (`records`, `lease`, `shard`, `epoch`, `lost`, `checkpoint()`), plain or async. If
it returns None, the batch is done, and the next checkpoint covers it (`--checkpoint-seconds`). If it raises or returns
anything else, the batch is tried again after a growing wait, up to `--attempts` times. Then this worker logs it, stops
reading the shard, and releases its lease for another worker to try. Nothing is skipped unless `--dead-letter` is given.
With it, the batch is searched in halves, in order and without waits, until the failing records are found; only these
are dead-lettered, and the shard continues. `leasehold replay` processes dead letters again. If a dead letter cannot be
written, the shard stops. A handler that runs for longer than a minute is logged; after `--handler-seconds` its lease is
released in the same way.

`--handler lambda:app.handler` calls an AWS Lambda function with the events of an event source mapping, one call at a
time; with `lambda:app.handler?report_batch_item_failures=true` its response is read, too. Batches have up to 100
records unless `--max-records` is given. `--concurrency N` calls it for up to N parts of a batch at a time, each with
its own keys and in a process of its own.

Seconds can be written as durations: `90`, `1.5s`, `5m`, `2h`, `1d12h`, `PT2H`. `--from` is where reading begins if a
shard's lease is new; `leasehold reset` moves the checkpoint of an existing lease. If the stream or the store does not
respond, the worker logs this and keeps trying until it is stopped. With `--no-wait` it ends with status 1 if they do
not respond at the start.

`--to` names the store to which `leasehold swap` moves the leases while the workers read; until then the leases stay
where they are. Every worker of the fleet needs this option before the swap begins.

With `--until` the workers read a slice: the records that arrived from `--from` (a time, or TRIM_HORIZON) up to that
time. A slice needs a store of its own, and all its workers need the same two times; `now` is a different time for each
of them. A shard is finished when all its records of the slice are handled; children of shards that were closed within
the slice are read, too. Each worker ends once the whole slice is read, and prints how much of it that worker has
handled. A killed worker is started again with the same times, and continues. For event hubs, name a separate consumer
group for the slice.

`--log json` writes one object per line to standard error: `at`, `level`, `logger`, `worker`, `message`, and if they
apply `lease`, `rule` (the number of the rule that requested the action) and `outcome` (done, refused or unknown: the
result of the write to the store). With `--verbose` there is a line for each lease that is created, taken or requested.

`--processes N` runs N workers, because a thread of Python uses only one processor at a time. They are named ID-0 to
ID-(N-1), after the ID given as `--worker`, also after a restart; each has its own `--memory-mib`. A signal drains them
together. One that ends by itself is started again, after a pause that grows from 1 s to 60 s. If one ends with status 2
or 141, or with `--no-wait` 1, all end. One that has not ended 5 s after `--drain-seconds` is killed, and the status is
1.

Exit status: 0 after a drain, or when the slice is read; 1 if the worker could not continue, or was stopped before the
slice was read; 2 on bad usage; 141 if the reader of `--events` has gone. If a handler raises SystemExit, the worker
ends with its status.
"""


LogForm = Literal["text", "json"]


@app.command(help="Join a group of workers and process this worker's shards.", epilog=EPILOG)
@add_table_options()
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
    me = options["worker"] = make_worker_id() if options["worker"] is None else options["worker"]
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log == "json":
        for log_handler in logging.getLogger().handlers:
            log_handler.setFormatter(JsonLines(me))
    logging.getLogger("leasehold").setLevel(logging.INFO if verbose else logging.WARNING)
    with exit_on_failure("consume", StoreError, SourceError, DeadLetterError, WorkerError):
        chosen_handler = _choose_handler(handler, me, options, events=events)
        if events and sys.__stdout__ is None:
            print("leasehold consume: standard output is closed, so no one can read the events", file=sys.stderr)
            raise typer.Exit(CLOSED_PIPE_STATUS)
        consumption = check_consumption_options(source, store, chosen_handler, options, flag_name)
        if processes < 1:
            raise ValueError(f"--processes: {processes} is not a whole number above 0")
        if processes > 1:
            raise typer.Exit(_run_supervised(me, store, processes, consumption))
        with consumption.open_worker() as worker, print_start_lines(worker, source, store):
            verdict = consumption.run(worker, on_runner_started=lambda runner: call_at_end_of_supervisor(runner.stop))
    if verdict is not None:
        summary_text = f"handled here: {verdict.records} records, and {verdict.shards} of its shards to their end"
        dead_letters_note = f", {verdict.letters} were dead-lettered" if verdict.letters else ""
        slice_state = (
            "the slice is read" if verdict.finished else "the slice is not read completely: start again to continue"
        )
        print(f"{slice_state}; {summary_text}{dead_letters_note}", file=sys.stderr if events else sys.stdout)
        raise typer.Exit(0 if verdict.finished else 1)


def _choose_handler(handler: str | None, me: str, options: Options, *, events: bool) -> str | Handling:
    if events == (handler is not None):
        raise ValueError("choose one of --handler module:function and --events")
    if handler is not None:
        discard_if_output_closed()
        return handler
    for name in ("concurrency", "linger_seconds"):
        if options.get(name):  # 0 is the default
            raise ValueError(f"{flag_name(name)}: it goes with --handler")
    return EventLines(me, sys.stdout).handling


def _run_supervised(me: str, store: str, processes: int, consumption: Consumption) -> int:
    """Run this command as several processes, and return the exit status.

    Raises ValueError if the processes cannot share the leases.
    """
    if split_store_url(store)[0] == "memory":
        raise ValueError(
            "--processes: they cannot share memory://, which exists in one process; use sqlite:// or another store"
        )
    if consumption.time_slice is not None:
        raise ValueError(
            "--processes: workers of a slice end by themselves, and would be started again; start several commands"
        )
    arguments = sys.argv[1:]  # if an option is repeated, the last one counts
    separator_index = arguments.index("--") if "--" in arguments else len(arguments)
    commands = {}
    for name in (f"{me}-{number}" for number in range(processes)):
        child_arguments = (
            *arguments[:separator_index],
            "--worker",
            name,
            "--processes",
            "1",
            *arguments[separator_index:],
        )
        commands[name] = (sys.executable, "-P", "-c", "from leasehold.adapters.cli import run; run()", *child_arguments)
    final_statuses = {2, CLOSED_PIPE_STATUS} | (set() if consumption.options["wait"] else {1})
    return Supervisor(commands, consumption.options["drain_seconds"], final_statuses).run(termination_signals())
