"""`leasehold produce`: writes the lines of a file to a Kinesis stream, aggregated, each key in order."""

import json
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, BinaryIO, Self, Unpack

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from leasehold.adapters.cli.common.ending import exit_on_failure
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.inputs import flag_name
from leasehold.adapters.options import ProduceOptions
from leasehold.adapters.producing import open_producer
from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.sources.kinesis.producer.producer import Producer, RecordFuture
from leasehold.errors import ProducerError, RecordFailed, SourceError
from leasehold.stores.fields import escape_surrogates, parse_decimal
from leasehold.stores.printable import limited_error_text, printable

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

_COLUMN_MAX = 10**9  # the highest column number; no line has as many columns
PROGRESS_STEP = 1000  # lines between two updates of the displayed progress

EPILOG = """
SOURCE is a URL: `kinesis://stream?region=…`. Each line is one record; empty lines are skipped. The partition key:

`line` the whole line · `field:3` the third column, see `--delimiter` · `json:customer` that member of the line, which
is a JSON object, if the member isn't null · `fixed:text` the same key for all lines (keeps them in order, on one
shard).

SIGTERM or Ctrl-C stops reading and sends the lines that were read; a second signal ends the command at once.

Exit status: 0 if every line that was read is in the stream, 1 if not, 2 on bad usage.
"""

KeyFunction = Callable[[bytes], str]


@app.command(help="Write lines to a stream, aggregated like the KPL, each key in order.", epilog=EPILOG)
@add_table_options()
def command(
    source: Annotated[str, typer.Argument(help="Write to this stream, a URL.", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(help="Write the lines of this file; without it, of standard input.")
    ] = None,
    key: Annotated[
        str, typer.Option(help="Take the partition key from line, field:N, json:NAME or fixed:TEXT.")
    ] = "line",
    delimiter: Annotated[str, typer.Option(help="Split columns here, for field:N.")] = ",",
    *,
    json_: Annotated[bool, typer.Option("--json", help="Print the counters as JSON at the end.")] = False,
    **options: Unpack[ProduceOptions],
) -> None:
    """Send the lines until the end of the input or a signal, then wait until all are written."""
    with exit_on_failure("produce", SourceError, ProducerError, misuse=(ValueError, OSError)):
        key_of = _make_key_function(key, delimiter)
        with file.open("rb") if file else sys.stdin.buffer as lines:
            written_counts = _write_lines(open_producer(source, options, flag_name), lines, key_of)
    counter_labels = {
        "UserRecordsPut": "records written",
        "KinesisRecordsPut": "as Kinesis records",
        "AllErrors": "rejections",
    }
    counter_labels |= {"UserRecordExpired": "given up", "UserRecordsOutcomeUnknown": "perhaps written twice"}
    if written_counts["UserRecordsFailed"]:
        counter_labels |= {"UserRecordsFailed": "refused"}
    summary_text = ", ".join(f"{written_counts[name]} {label}" for name, label in counter_labels.items())
    print(json.dumps(written_counts) if json_ else summary_text)
    if (
        written_counts["UserRecordsPending"]
        or written_counts["UserRecordExpired"]
        or written_counts["UserRecordsFailed"]
    ):
        raise typer.Exit(1)


def _make_key_function(key_option: str, delimiter: str) -> KeyFunction:
    """Return the function that extracts a line's partition key."""
    kind, _, argument = key_option.partition(":")
    if kind == "line" and not argument:
        return bytes.decode
    if kind == "fixed" and argument:
        return lambda _line: argument
    if kind == "json" and argument:
        return lambda line: _extract_member_key(line, argument)
    if kind == "field" and (column := parse_decimal(argument, _COLUMN_MAX)) and delimiter:
        return lambda line: _extract_field_key(line, column, delimiter)
    raise ValueError(f"--key: {key_option!r} is none of line, field:N (from 1), json:NAME and fixed:TEXT")


def _extract_member_key(line: bytes, name: str) -> str:
    try:
        document = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise ValueError(f"--key json:{name}: it is not JSON") from None
    # Treat null like a missing member. Otherwise all lines without a key would share the key "null", and one shard.
    if not isinstance(document, dict) or document.get(name) is None:
        raise ValueError(f"--key json:{name}: it is not an object with a member {name!r} that is not null")
    member_value = document[name]
    try:
        json_value = json.dumps(member_value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number such as 1e400, which Python reads as infinity
        raise ValueError(f"--key json:{name}: its number is too large") from None
    key = member_value if isinstance(member_value, str) else json_value
    if escape_surrogates(key) != key:
        raise ValueError(f"--key json:{name}: {key!r} is not UTF-8")
    return key


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _extract_field_key(line: bytes, number: int, delimiter: str) -> str:
    fields = line.split(delimiter.encode())
    if number > len(fields):
        raise ValueError(f"--key field:{number}: it has {len(fields)} fields between {delimiter!r}; see --delimiter")
    return fields[number - 1].decode()


def _write_lines(producer: Producer, lines: BinaryIO, key_of: KeyFunction) -> dict[str, float | dict[str, int]]:
    """Send every line, drain, and return the producer's counters."""
    console = Console(stderr=True)
    progress_columns = (TextColumn("{task.completed:,.0f} lines read"), TimeElapsedColumn())
    # Show a line counter if standard error is a terminal.
    progress = Progress(*progress_columns, console=console, disable=not console.is_terminal, transient=True)
    pending_puts = deque[tuple[int, RecordFuture]]()
    with _EndSignalTracker() as signal_tracker, producer, progress:
        progress_task = progress.add_task("", total=None)
        for number, line in enumerate(signal_tracker.read_lines(lines), 1):
            if data := line.rstrip(b"\r\n"):
                try:
                    pending_puts.append((number, producer.put(data, key_of(data))))
                except UnicodeDecodeError:
                    raise ValueError(f"line {number}: its partition key is not UTF-8") from None
                except ValueError as error:
                    raise ValueError(f"line {number}: it cannot become a record: {error}") from None
            if number % PROGRESS_STEP == 0:
                progress.update(progress_task, completed=number)
                while pending_puts and pending_puts[0][1].done:
                    _report_failure(*pending_puts.popleft())
        producer.flush()
        for number, future in pending_puts:
            _report_failure(number, future)
    return producer.metrics


def _report_failure(number: int, future: RecordFuture) -> None:
    """Print a message for a line that was rejected. Other failures are reported at the end of the command."""
    try:
        future.result(0)
    except RecordFailed as error:
        print(printable(f"leasehold produce: line {number}: {limited_error_text(error)}"), file=sys.stderr)
    except ProducerError:
        pass


class _EndSignalReceived(BaseException):
    """A signal arrived while waiting for a line."""


class _EndSignalTracker:
    """Tracks whether a signal to end has arrived. A signal can interrupt the wait for a line, but never a `put`."""

    def __init__(self) -> None:
        self.end_requested = self.reading = False

    def __enter__(self) -> Self:
        self.previous_handlers = {
            number: replace_handler(number, self.on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_fault: object) -> None:
        for number, handler in self.previous_handlers.items():
            restore_handler(number, handler)

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Handle the first signal. A second signal ends the process immediately."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.end_requested = True
        if self.reading:
            raise _EndSignalReceived

    def read_lines(self, source: BinaryIO) -> Iterator[bytes]:
        """Yield lines until the end of the input, or until a signal arrives."""
        try:
            while not self.end_requested:
                self.reading = True
                line = source.readline()
                self.reading = False
                if not line:
                    return
                yield line
        except _EndSignalReceived:
            return
