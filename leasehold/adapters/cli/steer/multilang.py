"""`leasehold multilang`: runs a MultiLangDaemon without Java from the command line."""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Unpack, cast

import typer
from attrs import evolve

from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.standard_streams import discard_if_output_closed
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.consumer.runner import Runner
from leasehold.adapters.consuming import check_consumption_options, open_dead_letter
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.multilang.children import ChildProcesses
from leasehold.adapters.multilang.daemon import ChildHandler
from leasehold.adapters.multilang.properties import interpret_properties, read_properties
from leasehold.adapters.options import Options, options_by_name
from leasehold.adapters.signals import replace_handler
from leasehold.errors import DeadLetterError, SourceError, StoreError, WorkerError
from leasehold.stores.urls import split_store_url

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(help="Run KCL record processors in any language, without Java.")
@add_table_options("attempts", "dead_letter", "to")
def command(
    file: Annotated[Path | None, typer.Argument(help="Read this .properties file.", show_default=False)] = None,
    properties_file: Annotated[
        Path | None, typer.Option("--properties-file", "-p", help="Read this .properties file.", show_default=False)
    ] = None,
    log_configuration: Annotated[
        str | None, typer.Option("--log-configuration", "-l", help="Ignore this option of Java.", show_default=False)
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Set a key in place of the file: key=value.")] = None,
    *,
    environment: Annotated[bool, typer.Option(help="Take ${NAME} in values from the environment.")] = False,
    strict: Annotated[
        bool, typer.Option(help="Exit as Java does: 1 after a child's fault, 143 after SIGTERM.")
    ] = False,
    verbose: Annotated[bool, typer.Option(help="Log every lease that is taken or released.")] = False,
    **options: Unpack[Options],
) -> None:
    """Run one worker until it is stopped."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("leasehold").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("leasehold.child").setLevel(logging.DEBUG)
    with exit_on_failure("multilang", StoreError, SourceError, WorkerError, DeadLetterError):
        if (file is None) == (properties_file is None):
            raise ValueError("name one file: FILE, or --properties-file FILE")
        properties_path = cast("Path", file or properties_file)
        properties = read_properties(properties_path, set_ or (), os.environ if environment else None)
        discard_if_output_closed()
        settings = interpret_properties(properties)
        print(settings.support_table(), file=sys.stderr)
        if log_configuration is not None:
            print(f"--log-configuration: {log_configuration} is for Java, and is ignored", file=sys.stderr)
        children = ChildProcesses(
            settings.argv, max_records=settings.max_records, timeout_seconds=settings.timeout_seconds
        )
        dead_letter = options["dead_letter"]
        if isinstance(dead_letter, str):
            dead_letter = open_dead_letter(dead_letter, settings.source, settings.store, flag_name)
        attempts = options_by_name(Options)["attempts"].parse_and_check(options["attempts"], "--attempts")
        handler = ChildHandler(
            children, attempts=attempts, dead_letter=dead_letter, send_empty=settings.send_empty, strict=strict
        )
        consumption = check_consumption_options(
            settings.source, settings.store, handler.handling, {**settings.options, "to": options["to"]}, flag_name
        )
        table_session = settings.table_credentials.session()
        # The credentials in the file are for AWS. Credentials for another cloud come from the environment.
        target_session = (
            table_session
            if (target_url := options["to"]) is not None and split_store_url(target_url)[0] in {"dynamodb", "s3"}
            else None
        )
        consumption = evolve(consumption, sessions=(settings.credentials.session(), table_session, target_session))
        received_signals = list[int]()

        def on_begun(runner: Runner) -> None:
            handler.set_runner(runner)
            _record_signals(received_signals)

        with handler, consumption.open_worker() as worker:
            consumption.run(worker, on_runner_started=on_begun)
    if strict:
        raise typer.Exit(1 if handler.fault is not None or not received_signals else 128 + received_signals[0])


def _record_signals(received_signals: list[int]) -> None:
    """Install handlers that note SIGTERM and SIGINT, and then call the handlers that were set before."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        previous_handler = signal.getsignal(signal_number)

        def record_signal(number: int, frame: FrameType | None) -> None:
            # Record the signal before the worker's own handler runs, because the exit status depends on the signal.
            received_signals.append(number)
            if callable(previous_handler):  # noqa: B023  the worker's own handler is the same for each signal
                previous_handler(number, frame)  # noqa: B023

        replace_handler(signal_number, record_signal)
