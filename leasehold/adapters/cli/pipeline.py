"""`leasehold pipeline`: writes a leased stream to Parquet files, with Spark."""

import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import typer
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from leasehold.adapters.signals import replace_handler
from leasehold.adapters.spark.event_hubs.options import HUB, reject_secrets
from leasehold.adapters.spark.options import OptionReader
from leasehold.adapters.spark.pipeline import open_session
from leasehold.adapters.spark.supervision import supervise
from leasehold.adapters.toolchain import ServiceError
from leasehold.stores.printable import printable

OUR_ERROR = re.compile(r"\b(?:leasehold\.[\w.]+|ValueError|ImportError): (.+)")
"""Finds the message of one of our errors in Spark's error message, which adds the class name and other text."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

EPILOG = """
`--set` sets options of the source: `--set kinesis.streamName=flights --set lease.store=dynamodb://flights`.

`FOLDER/rows/NAME` contains the source's columns, with one row for each record. A batch that is repeated is written
once. `FOLDER/progress/NAME` is the query's checkpointLocation. If several queries use one lease table, give each a
`--name`.

Each batch is printed as one line of JSON. The command runs until Ctrl-C (or SIGTERM), which stops the query and
releases its leases. This module can also be passed to spark-submit.
"""


SourceFormat = Literal["kinesis-leased", "dynamodb-leased", "eventhubs-leased"]


@app.command(help="Write a stream to Parquet files.", epilog=EPILOG)
def command(
    source: Annotated[SourceFormat, typer.Argument(help="Read from a source of this format.", show_default=False)],
    folder: Annotated[str, typer.Option(help="Write rows and progress to this folder.", show_default=False)],
    options: Annotated[list[str] | None, typer.Option("--set", help="Set an option of the source: NAME=VALUE.")] = None,
    name: Annotated[str, typer.Option(help="Name the query.")] = "main",
    once: Annotated[bool, typer.Option("--once", help="Read what exists now, and exit.")] = False,
) -> None:
    """Run the query until it ends or is stopped, and report an error in one line."""
    try:
        source_options = _parse_options(options or ())
        # Check for secrets here, because the page of a Spark Connect server shows every option, even a rejected one.
        reject_secrets(OptionReader(source_options, HUB))
        # Silence py4j's logger. For each interrupted call, py4j logs a traceback and also raises the exception.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        if threading.current_thread() is threading.main_thread():
            # Let SIGTERM end the process in the same way as Ctrl-C, without a traceback.
            replace_handler(signal.SIGTERM, signal.default_int_handler)
        spark = open_session(f"leasehold pipeline {name}")
        stop_requested, printer = _install_stop_handlers(), BatchPrinter()

        def start_streaming() -> StreamingQuery:
            records = spark.readStream.format(source).options(**source_options).load()
            writer = records.writeStream.format("parquet").option("path", f"{folder}/rows/{name}").queryName(name)
            writer = writer.option("checkpointLocation", f"{folder}/progress/{name}")
            triggered_writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="1 second")
            return printer.set_query(triggered_writer.start())

        supervise(start_streaming, should_stop=lambda: printer.print_new_batches() or stop_requested())
        printer.print_new_batches()
    except KeyboardInterrupt:
        pass  # Ctrl-C is the way to end the command
    except (ValueError, ServiceError, PySparkException) as error:
        message = str(error)
        message_lines = message.splitlines()
        if isinstance(error, PySparkException) and (match := OUR_ERROR.search(message)):
            message_lines = [match[1]]  # our own message within Spark's
        elif not isinstance(error, StreamingQueryException):
            message_lines = message_lines[:1]  # only the failure of a query is printed in full
        print("leasehold pipeline: " + "\n".join(map(printable, message_lines)), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


class BatchPrinter:
    """Prints each finished batch of a query once, even if the query is restarted."""

    def __init__(self) -> None:
        self._query: StreamingQuery | None = None
        self._last_batch = -1

    def set_query(self, query: StreamingQuery) -> StreamingQuery:
        """Print the batches of this query from now on. Return the query."""
        self._query = query
        return query

    def print_new_batches(self) -> bool:
        """Print the batches that were finished since the last call. Always return False, for use in `should_stop`."""
        for batch in select_finished_batches(self._query.recentProgress if self._query else (), self._last_batch):
            self._last_batch = batch["batch"]
            print(json.dumps(batch), flush=True)
        return False


def select_finished_batches(progress: Sequence[Any], last_number: int) -> Iterator[dict[str, Any]]:
    """Yield the batches after number `last_number` in a query's progress."""
    for batch in progress:
        # Skip a batch that has not begun. While a query is idle, Spark's progress already contains the next batch.
        if "addBatch" in batch["durationMs"] and batch["batchId"] > last_number:
            last_number = batch["batchId"]
            row_count = batch["numInputRows"]
            if row_count is None:  # Spark Connect does not report the total
                row_count = sum(source["numInputRows"] for source in batch["sources"])
            batch_seconds = batch["durationMs"].get("triggerExecution", 0) / 1000
            yield {"query": batch["name"], "batch": last_number, "rows": row_count, "seconds": batch_seconds}


def _install_stop_handlers() -> Callable[[], bool]:
    """Return a function that checks whether a signal to end has arrived. A second signal raises KeyboardInterrupt.

    The first signal must not raise an exception, because py4j swallows exceptions while it releases an object. The new
    handler also replaces Spark's own, which would make running queries fail instead of stopping them.
    """
    received_signals: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        if received_signals:
            raise KeyboardInterrupt
        received_signals.append(number)

    if threading.current_thread() is threading.main_thread():
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            replace_handler(signal_number, on_signal)
    return lambda: bool(received_signals)


def _parse_options(assignments: Sequence[str]) -> dict[str, str]:
    names_and_values = [option.partition("=") for option in assignments]
    for option, separator, _ in names_and_values:
        if not (option and separator):
            raise ValueError(f"--set: {option!r} is not NAME=VALUE")
    return {option: value for option, _, value in names_and_values}


if __name__ == "__main__":
    app()
