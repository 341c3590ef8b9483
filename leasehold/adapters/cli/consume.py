"""`leasehold consume`: runs one or more workers of a fleet from the command line."""

import logging
import math
import sys
from typing import Annotated, Literal, cast

import typer

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.cli.common.standard_streams import drop_output
from leasehold.adapters.cli.common.start_lines import start_lines
from leasehold.adapters.cli.common.supervisor import Supervisor, at_end_of_supervisor
from leasehold.adapters.cli.common.times import seconds
from leasehold.adapters.consumer.events import CLOSED_STATUS, EventLines, JsonLines
from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS, Handling
from leasehold.adapters.consumer.runner import DRAIN_SECONDS, MEMORY_BYTES, READERS, endings
from leasehold.adapters.consuming import MIB, OPTIONS, Options, consumption, worker_id
from leasehold.adapters.inputs import dashed
from leasehold.adapters.json_form import RULES
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
stops the shard. A handler at work for longer than `--slow-seconds` is said; beyond `--handler-seconds` its lease is
released likewise.

`--handler lambda:app.handler` calls an AWS Lambda function with the events of an event source mapping, one call at a
time; `lambda:app.handler?report_batch_item_failures=true` reads its response, too. Batches have up to 100 records
unless `--max-records` says otherwise.

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

# Options that are too long for one line in the signature of the command.
LeaseSeconds = Annotated[
    float | None,
    typer.Option(
        help="Seconds without a renewal after which a worker counts as dead. Same for all workers. [10; hubs: 120]",
        parser=seconds(),
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(help="Keys of a batch at once, each in order; for async def handlers.", show_default=False)
]
DeadLetterPlace = Annotated[
    str | None,
    typer.Option(
        help="Where records that keep failing go: file://…, s3://…, kinesis://…, or module:function(batch, error).",
        show_default=False,
    ),
]
MaxRecords = Annotated[
    int | None, typer.Option(min=1, help="Most records in a batch. [as many as one read brings]", show_default=False)
]
HandlerSeconds = Annotated[
    float,
    typer.Option(
        help="Give the lease up when one batch takes longer than this. [never]", show_default=False, parser=seconds()
    ),
]
SlowSeconds = Annotated[
    float, typer.Option(help="Log a warning (and count it) when one batch takes longer than this.", parser=seconds())
]
LateCheckpoints = Annotated[
    bool, typer.Option(help="If the shard moved while a batch was in progress, try to save its checkpoint anyway.")
]
CheckpointSeconds = Annotated[
    float, typer.Option(help="Least time between two checkpoints; 0: after every batch.", parser=seconds())
]
DrainSeconds = Annotated[
    float, typer.Option(help="Most time to finish and release when told to end.", parser=seconds())
]
InitialPosition = Annotated[
    str,
    typer.Option(
        "--initial-position",
        "--from",
        help="TRIM_HORIZON, LATEST, or a time: 2026-11-22T06:00Z, now-2h. New leases only.",
    ),
]
Until = Annotated[
    str | None,
    typer.Option(help="Read a slice, from --from up to this time, and end. The store holds its leases alone."),
]
IfRecreated = Annotated[
    Literal["TRIM_HORIZON", "LATEST"] | None,
    typer.Option(help="Where to begin if the stream was deleted and created again. [it is not read]"),
]
To = Annotated[
    str | None, typer.Option(help="Where `leasehold swap` moves the leases while the fleet reads.", show_default=False)
]
Processes = Annotated[int, typer.Option(min=1, help="How many workers to run here, each in a process of its own.")]
MemoryMib = Annotated[int, typer.Option(min=1, help="MiB for what is read and not handled yet, of all shards.")]
Metrics = Annotated[
    str | None, typer.Option(help="none, console, otlp, or another exporter. [OTEL_METRICS_EXPORTER, or none]")
]


@app.command(help="Join a group of workers and process this worker's shards.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    source: Annotated[str, typer.Argument(help="What to read, as a URL.", show_default=False)],
    store: Annotated[str, typer.Option(help="Where the leases are, as a URL.", show_default=False)],
    to: To = None,
    handler: Annotated[
        str | None, typer.Option(help="module:function, called with each batch; or lambda:file.function.")
    ] = None,
    events: Annotated[bool, typer.Option("--events", "--json", help="Print a JSON line for each event.")] = False,
    worker: Annotated[str | None, typer.Option(help="This worker's id; keep it over restarts. [host-pid]")] = None,
    processes: Processes = 1,
    rules: Annotated[str, typer.Option(help=f"One of {', '.join(RULES)}.")] = "minimal",
    lease_seconds: LeaseSeconds = None,
    initial_position: InitialPosition = "LATEST",
    timestamp_ms: Annotated[int | None, typer.Option(help="For AT_TIMESTAMP: ms since 1970.")] = None,
    until: Until = None,
    if_recreated: IfRecreated = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another setting, as name=value.")] = None,
    concurrency: Concurrency = None,
    attempts: Annotated[int, typer.Option(help="How many times to try a batch.")] = 5,
    max_records: MaxRecords = None,
    threads: Annotated[int, typer.Option(min=1, help="Shards read or handled at a time, each in a thread.")] = READERS,
    dead_letter: DeadLetterPlace = None,
    slow_seconds: SlowSeconds = 60.0,
    handler_seconds: HandlerSeconds = math.inf,
    checkpoint_seconds: CheckpointSeconds = CHECKPOINT_SECONDS,
    late_checkpoints: LateCheckpoints = False,
    drain_seconds: DrainSeconds = DRAIN_SECONDS,
    create: Annotated[bool, typer.Option(help="Make the table if there is none.")] = True,
    wait: Annotated[bool, typer.Option(help="Go on trying where stream or store do not answer at the start.")] = True,
    memory_mib: MemoryMib = MEMORY_BYTES // MIB,
    metrics: Metrics = None,
    log: Annotated[LogForm, typer.Option(help="How lines on standard error are written.")] = "text",
    verbose: Annotated[bool, typer.Option(help="Log every lease that is taken or released.")] = False,
) -> None:
    """Run one worker until it is told to end."""
    # Parameters have the names of the options, here and in Python. Only `set` is a built-in and gets an underscore.
    given = {name.removesuffix("_"): value for name, value in locals().items()}
    me = worker_id() if worker is None else worker
    options = cast("Options", {name: given[name] for name in OPTIONS} | {"worker": me})
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if log == "json":
        for log_handler in logging.getLogger().handlers:
            log_handler.setFormatter(JsonLines(me))
    logging.getLogger("leasehold").setLevel(logging.INFO if verbose else logging.WARNING)
    with ending("consume", StoreError, SourceError, DeadLetterError, WorkerError):
        chosen_handler = _handler(handler, me, concurrency, events=events)
        if events and sys.__stdout__ is None:
            print("leasehold consume: standard output is closed, so no one can read the events", file=sys.stderr)
            raise typer.Exit(CLOSED_STATUS)
        described = consumption(source, store, chosen_handler, options, dashed)
        if processes > 1:
            raise typer.Exit(_supervised(me, store, processes, drain_seconds, sliced=until is not None, wait=wait))
        with described.joined() as joined, start_lines(joined, source, store):
            verdict = described.run(joined, begun=lambda runner: at_end_of_supervisor(runner.stop))
    if verdict is not None:
        done = f"handled here: {verdict.records} records, and {verdict.shards} of its shards to their end"
        letters = f", {verdict.letters} went to the dead letter" if verdict.letters else ""
        state = "the slice is read" if verdict.finished else "the slice is not read to its end: start again to go on"
        print(f"{state}; {done}{letters}", file=sys.stderr if events else sys.stdout)
        raise typer.Exit(0 if verdict.finished else 1)


def _handler(handler: str | None, me: str, concurrency: int | None, *, events: bool) -> str | Handling:
    if events == (handler is not None):
        raise ValueError("choose one of --handler module:function and --events")
    if handler is not None:
        drop_output()
        return handler
    if concurrency is not None:
        raise ValueError("--concurrency: it goes with --handler")
    return EventLines(me, sys.stdout).handling


def _supervised(me: str, store: str, processes: int, drain_seconds: float, *, sliced: bool, wait: bool) -> int:
    """Run this command as several processes, and return the exit status.

    Raises ValueError if they cannot share the leases.
    """
    if store_address(store)[0] == "memory":
        raise ValueError("--processes: they cannot share memory://, which is of one process; sqlite:// would do")
    if sliced:
        raise ValueError("--processes: a slice ends by itself, and they would be started again; start several commands")
    arguments = sys.argv[1:]  # if an option is repeated, the last one counts
    options = arguments.index("--") if "--" in arguments else len(arguments)
    commands = {}
    for name in (f"{me}-{number}" for number in range(processes)):
        words = (*arguments[:options], "--worker", name, "--processes", "1", *arguments[options:])
        commands[name] = (sys.executable, "-P", "-c", "from leasehold.adapters.cli import run; run()", *words)
    final = {2, CLOSED_STATUS} | (set() if wait else {1})
    return Supervisor(commands, drain_seconds, final).run(endings())
