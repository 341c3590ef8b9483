"""`leasehold pipeline`: writes a leased stream as partitioned Parquet and adds it up in windows, with Spark."""

import json
import logging
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame

from leasehold.adapters.consumer.exporting import exporting
from leasehold.adapters.report.progress import BatchProgress, ProgressPage, ReadingProgress
from leasehold.adapters.signals import replace_handler
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.spark.event_hubs.options import refuse_secrets
from leasehold.adapters.spark.options import Given
from leasehold.adapters.spark.pipeline import OutputPlace, Recipe, aggregate, aggregated, begun, finished, land, session
from leasehold.adapters.spark.supervision import WAIT_SECONDS, passing
from leasehold.adapters.toolchain import ServiceError
from leasehold.stores.printable import escaped, printable

OURS = re.compile(r"\b(?:leasehold\.[\w.]+|ValueError|ImportError): (.+)")
"""Matches our own error in a message of Spark, after Spark's prefix."""

LOOK_SECONDS = 1
"""Seconds between two checks of the queries' progress."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
`--set` gives the source's own options: `--set kinesis.streamName=flights --set lease.store=dynamodb://flights`.

`FOLDER/rows/NAME` gets one row for each record, by `kind` (`row`, or `dead-letter` with its bytes) and
date; `FOLDER/windows` every window that the watermark has passed. A batch that is replayed is written once. What
landed twice because a shard changed hands is counted once.

Several applications share one stream: give each a `--name` and the same lease table and folder, let one of them
aggregate (`--also NAME` for each other), and the others only land (`--no-windows`).

Each batch is told as one line of JSON, `--page` draws them, and `--metrics` exports them. It goes on until Ctrl-C (or
SIGTERM), which stops the queries and releases their leases. The same file can be given to spark-submit.
"""


RecordForm = Literal["json", "csv"]
TableFormat = Literal["parquet", "delta"]
SourceFormat = Literal["kinesis-leased", "eventhubs-leased"]


@app.command(help="Land a stream as Parquet, and add it up in windows of time.", epilog=MORE)
def command(  # noqa: PLR0917  one for each option
    source: Annotated[SourceFormat, typer.Argument(help="Where records come from.", show_default=False)],
    folder: Annotated[str, typer.Option(help="Where everything is written.", show_default=False)],
    schema: Annotated[str, typer.Option(help="The fields of a record: `name type, …`.", show_default=False)],
    time: Annotated[str, typer.Option(help="The field that says when it happened.", show_default=False)],
    options: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE: an option of the source.")] = None,
    form: Annotated[RecordForm, typer.Option("--format", help="What a record holds.")] = "json",
    window: Annotated[str, typer.Option(help="How long a window lasts.")] = "10 minutes",
    watermark: Annotated[str, typer.Option(help="How late a record may be.")] = "1 hour",
    by: Annotated[list[str] | None, typer.Option(help="A field with windows of its own for each value.")] = None,
    value: Annotated[list[str] | None, typer.Option(help="A numeric field to add up.")] = None,
    name: Annotated[str, typer.Option(help="This application's.")] = "main",
    also: Annotated[list[str] | None, typer.Option(help="Another application whose rows are added up.")] = None,
    windows: Annotated[bool, typer.Option(help="Whether to add up at all.")] = True,
    tables: Annotated[TableFormat, typer.Option(help="How it is written; delta needs delta-spark.")] = "parquet",
    once: Annotated[bool, typer.Option("--once", help="Read what is there, and end.")] = False,
    page: Annotated[Path | None, typer.Option(help="Draw the progress into this HTML file.")] = None,
    metrics: Annotated[str | None, typer.Option(help="An OpenTelemetry exporter: otlp, console.")] = None,
) -> None:
    """Start, tell, and stop with what ends."""
    recipe = Recipe(form, schema, time, window, watermark, tuple(by or ()), tuple(value or ()))
    try:
        recipe.check()
        source_options = _options(options or ())
        refuse_secrets(
            Given(source_options)
        )  # must run here: a Connect server's page shows every option that it receives, even a rejected one
        # py4j logs the traceback of each call that is interrupted, although it also raises the exception.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        if threading.current_thread() is threading.main_thread():
            # SIGTERM from a supervisor ends the process as Ctrl-C does, without a traceback.
            replace_handler(signal.SIGTERM, signal.default_int_handler)
        spark = session(f"leasehold pipeline {name}", delta=tables == "delta", quiet=True)
        ending = _asked_to_end()
        records = spark.readStream.format(source).options(**source_options).load()
        place = OutputPlace(folder, name, tables)
        with closing(run(records, recipe, place, also or (), windows=windows, once=once, ending=ending)) as batches:
            tell(batches, ProgressPage(name, page) if page else None, metrics)
    except KeyboardInterrupt:
        pass  # the way to end it
    except (ValueError, ServiceError, PySparkException) as error:
        text = str(error)
        lines = text.splitlines()
        if isinstance(error, PySparkException) and (match := OURS.search(text)):
            lines = [match[1]]  # our own message, which Spark has wrapped
        elif not isinstance(error, StreamingQueryException):
            lines = lines[:1]  # only the failure of a query is printed in full
        print("leasehold pipeline: " + "\n".join(map(printable, lines)), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _asked_to_end() -> Callable[[], bool]:
    """Return a function that checks whether a signal has asked us to end. A second signal raises KeyboardInterrupt.

    The first signal must not raise: py4j swallows exceptions while it releases an object. The new handler also replaces
    Spark's own, which would make running queries fail instead of stopping them.
    """
    received: list[int] = []

    def ask(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is threading.main_thread():
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            replace_handler(signal_number, ask)
    return lambda: bool(received)


def tell(batches: Iterable[BatchProgress | ReadingProgress], page: ProgressPage | None, metrics: str | None) -> None:
    """Print each batch, and add all reports to the page and to the exported metrics.

    Args:
        batches: The reports of batches and of reading.
        page: The page to write, if any.
        metrics: The name of the exporter, if any.

    Raises:
        ValueError: There is no such exporter.
    """
    with exporting(metrics) as meter:
        tellers = [] if page is None else [page.tell]
        if meter is not None:
            from leasehold.adapters.spark.pipeline import PipelineMetrics  # noqa: PLC0415  an extra

            tellers.append(PipelineMetrics(meter).tell)
        try:
            for report in batches:
                if isinstance(report, BatchProgress):
                    print(json.dumps(report.json), flush=True)
                for teller in tellers:
                    teller(report)
        finally:
            if page is not None:
                page.write(running=False)


def _options(given: Sequence[str]) -> dict[str, str]:
    pairs = [option.partition("=") for option in given]
    for option, separator, _ in pairs:
        if not (option and separator):
            raise ValueError(f"--set: {option!r} is not NAME=VALUE")
    return {option: value for option, _, value in pairs}


def run(
    records: DataFrame,
    recipe: Recipe,
    place: OutputPlace,
    also: Sequence[str],
    *,
    windows: bool,
    once: bool,
    ending: Callable[[], bool] = lambda: False,
) -> Generator[BatchProgress | ReadingProgress]:
    """Run the queries until one ends or `ending` returns true, and yield their progress.

    All queries are stopped at the end. If they fail for a temporary reason, they are started again after a pause.
    """
    spark, waits = records.sparkSession, Backoff(*WAIT_SECONDS)

    def whole() -> Generator[BatchProgress | ReadingProgress]:
        queries = [begun(lambda: land(records, recipe, place, once=once))]

        def look() -> None:
            if windows and len(queries) == 1:
                queries.extend(aggregated(spark, recipe, place, also))

        try:
            if not once:
                yield from finished(queries, LOOK_SECONDS, look, ending)
                return
            yield from finished(queries, LOOK_SECONDS, ending=ending)
            if windows and not ending():  # all records to be added up have landed by now
                queries = [aggregate(spark, recipe, place, also, once=True)]
                yield from finished(queries, LOOK_SECONDS, ending=ending)
        finally:
            for query in queries:
                query.stop()

    while True:
        try:
            for report in whole():
                waits.reset()
                yield report
        except StreamingQueryException as fault:
            if (cause := passing(fault)) is None or ending():
                raise
        else:
            return
        wait = waits.next()
        escaped(logging.getLogger("leasehold.spark")).warning(
            "the queries ended, starting them again in %.0f s (%d in a row): %s", wait, waits.faults, cause
        )
        for _ in range(math.ceil(wait)):
            if not ending():
                time.sleep(1.0)


if __name__ == "__main__":
    app()
