"""`leasehold consume`: one worker of a fleet, from the command line."""

import json
import logging
import os
import socket
import sys
from typing import Annotated, Any

import typer
from attrs import evolve

from adapters.cli.callables import load
from adapters.event_hubs.pace import paced
from adapters.events import EventLines
from adapters.exporting import exporting
from adapters.handling import Handling
from adapters.holdings import WorkerError
from adapters.json_fields import Value
from adapters.plan_question import config_of
from adapters.runner import run
from adapters.source import SourceError
from adapters.urls import open_source
from adapters.worker import Worker
from balancer.config import Config
from stores.protocol import StoreError
from stores.urls import open_store

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
SOURCE is a URL: `kinesis://stream?region=…`. All workers that name the same source and store share its
shards. SIGTERM or Ctrl-C finishes the running batches, checkpoints and releases; a second one ends at once.

A handler is a function of one batch (`records`, `lease`, `shard`, `epoch`, `lost`, `checkpoint()`); when it
returns, the batch is checkpointed. When it raises, the batch is handed over again after a growing wait, up to
`--attempts`; then its shard stops here, says so, and its lease is released for another worker to try.
Nothing is skipped, unless `--dead-letter` takes the batch over.

Exit status: 0 after a drain, 1 when the worker could not go on, 2 on bad usage.
"""


@app.command(help="Join a fleet, and hand over the records of the shards it is given.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    source: Annotated[str, typer.Argument(help="What to read, as a URL.", show_default=False)],
    store: Annotated[str, typer.Option(help="Where the leases are, as a URL.", show_default=False)],
    handler: Annotated[str | None, typer.Option(help="module:function, called with each batch.")] = None,
    events: Annotated[bool, typer.Option("--events", "--json", help="Print a JSON line for each event.")] = False,
    worker: Annotated[str | None, typer.Option(help="This worker's id; keep it over restarts. [host-pid]")] = None,
    rules: Annotated[str, typer.Option(help="minimal, kcl, kcl-rust or event-hubs.")] = "minimal",
    lease_seconds: Annotated[
        float | None, typer.Option(help="How long a lease may stand still. [10; hubs: 120]")
    ] = None,
    initial_position: Annotated[str, typer.Option(help="TRIM_HORIZON, LATEST or AT_TIMESTAMP.")] = "LATEST",
    timestamp_ms: Annotated[int | None, typer.Option(help="For AT_TIMESTAMP: ms since 1970.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another setting, as name=value.")] = None,
    attempts: Annotated[int, typer.Option(help="How often a batch is handed over.")] = 5,
    dead_letter: Annotated[str | None, typer.Option(help="module:function(batch, error): takes what failed.")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Least time between two checkpoints.")] = 0.0,
    late_checkpoints: Annotated[bool, typer.Option(help="After a theft, still say how far this got.")] = False,
    create: Annotated[bool, typer.Option(help="Make the table if there is none.")] = True,
    metrics: Annotated[
        str | None, typer.Option(help="none, console, otlp, or another exporter. [OTEL_METRICS_EXPORTER, or none]")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Say what is taken and let go.")] = False,
) -> None:
    """Run one worker until it is told to end."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("leasehold").setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        me = worker or f"{socket.gethostname()}-{os.getpid()}"
        given = {"lease_seconds": lease_seconds, "timestamp_ms": timestamp_ms}
        settings = _settings({"rules": rules, "initial_position": initial_position} | given, set_ or [])
        config = _config(source, settings)
        handling = evolve(
            _handling(handler, me, events=events),
            attempts=attempts,
            dead_letter=load(dead_letter) if dead_letter else None,
            checkpoint_seconds=checkpoint_seconds,
            late_checkpoints=late_checkpoints,
        )
        joined = Worker(store=open_store(store, create=create), source=open_source(source), me=me, config=config)
    except ValueError as error:
        raise _ended(error, 2) from None
    except (StoreError, SourceError) as error:
        raise _ended(error, 1) from None
    _run(joined, handling, metrics)


def _run(worker: Worker, handling: Handling, metrics: str | None) -> None:
    try:
        with exporting(metrics) as meter:
            run(worker, handling, meter=meter)
    except ValueError as error:
        raise _ended(error, 2) from None
    except (WorkerError, StoreError, SourceError) as error:
        raise _ended(error, 1) from None
    finally:
        worker.source.close()
        worker.store.close()


def _config(source: str, settings: dict[str, Any]) -> Config:
    config = config_of(Value("input", settings))
    return paced(config, settings) if source.startswith("eventhubs:") else config


def _settings(given: dict[str, Any], more: list[str]) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if value is not None}
    for setting in more:
        name, separator, text = setting.partition("=")
        if not separator:
            raise ValueError(f"--set: {setting!r} is not of the form name=value")
        fields[name] = _value(text)
    return fields


def _value(text: str) -> Any:  # noqa: ANN401  the field that it is for says what it must be
    try:
        return json.loads(text)
    except ValueError:
        return text


def _handling(handler: str | None, me: str, *, events: bool) -> Handling:
    if events == (handler is not None):
        raise ValueError("choose one of --handler module:function and --events")
    return EventLines(me, sys.stdout).handling if handler is None else Handling(load(handler))


def _ended(error: Exception, status: int) -> typer.Exit:
    print(f"leasehold consume: {error}", file=sys.stderr)
    return typer.Exit(status)
