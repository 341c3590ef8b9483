"""`leasehold serve`: serves lease tables as a live, read-only page, with metrics and health checks."""

import logging
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Unpack

import typer
import uvicorn

from leasehold.adapters.cli.common.asking import make_fleet_config
from leasehold.adapters.cli.common.ending import EndSignal, exit_on_failure, raise_on_signal
from leasehold.adapters.cli.common.table_options import add_table_options
from leasehold.adapters.cli.common.times import make_seconds_parser
from leasehold.adapters.cli.leases import open_lag_source
from leasehold.adapters.ops.serving.app import BoundedConnection, saved_page, server
from leasehold.adapters.ops.serving.watcher import FleetRecord, TableWatcher
from leasehold.adapters.ops.swapping import open_for_reading
from leasehold.adapters.options import Options
from leasehold.adapters.threads import SIGNAL_SECONDS, spawn
from leasehold.adapters.worker.progress import LAG_STEP_SECONDS, LAG_STEPS
from leasehold.errors import SourceError, StoreError
from leasehold.stores.printable import error_summary
from leasehold.stores.urls import display_name

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")

LOOPBACK_HOSTS = ("127.0.0.1", "localhost")

EPILOG = """
    leasehold serve sqlite:///srv/orders.db
    leasehold serve 'dynamodb://orders-app?region=eu-central-1' --history moves.db
    leasehold serve sqlite:///srv/orders.db --once page.html

The page shows which worker holds which lease, the lag, and moves as they happen with their rules. A click on a lease or
a worker explains it. There are also `/leases.json`, `/metrics` for Prometheus, `/healthz` (503 unless every group has
the status OK of `leasehold leases --check`), and `/readyz` (503 while a table cannot be read: a probe of this server).

It reads the tables every `--every` seconds and writes nothing to them. It listens on this machine alone. With `--host`
it can be reached from other machines, and has no login: put a proxy in front of it. Requests are rejected if their host
is not `--host`, localhost or an `--allow-host`. While `leasehold swap` moves the leases of a STORE, `--to` shows both
tables as one, and which of them has each lease. `--source` queries the stream for lag that rows do not contain. Give
both options once for each STORE, in the same order.

`--once FILE` writes the page as one file and ends, once the status of every lease is known, or after two minutes.

Needs `leasehold[serve]`. Ends on Ctrl-C. Exit status: 0, 1 if a store cannot be used, 2 on bad usage.
"""


@app.command(help="Serve a live, read-only web page of lease tables.", epilog=EPILOG)
@add_table_options("rules", "lease_seconds", "set")
def command(  # noqa: PLR0917  one for each option
    stores: Annotated[list[str], typer.Argument(metavar="STORE...", help="Read the leases here, URLs.")],
    source: Annotated[
        list[str] | None, typer.Option(help="Query this stream for lag that rows do not contain.")
    ] = None,
    goals: Annotated[
        list[str] | None,
        typer.Option("--to", help="Name the store to which `leasehold swap` moves the leases; `-` for none."),
    ] = None,
    host: Annotated[str, typer.Option(help="Listen on this address.")] = LOOPBACK_HOSTS[0],
    port: Annotated[int, typer.Option(help="Listen on this port; 0 for a free one.", min=0, max=65535)] = 8095,
    allow_host: Annotated[list[str] | None, typer.Option(help="Accept requests for this host name, too.")] = None,
    once: Annotated[Path | None, typer.Option(help="Write the page to this file and exit; it needs no server.")] = None,
    every: Annotated[
        float, typer.Option(help="Wait this long between two reads.", parser=make_seconds_parser(0.1))
    ] = 2.0,
    history: Annotated[str | None, typer.Option(help="Keep moves and lag in this SQLite file. [memory]")] = None,
    **options: Unpack[Options],
) -> None:
    """Watch the tables and serve the page, or write it to a file."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with (
        exit_on_failure("serve", StoreError, SourceError, OSError),
        suppress(EndSignal),
    ):  # a signal is the way to end the command
        config = make_fleet_config(options)
        if source and len(source) != len(stores):
            raise ValueError("--source: give one for each STORE, or none")
        if goals and len(goals) != len(stores):
            raise ValueError("--to: give one for each STORE, `-` for one that does not move, or none")
        with raise_on_signal(), ExitStack() as stack:
            fleet_record = stack.enter_context(closing(FleetRecord(history)))
            watchers = []
            for index, url in enumerate(stores):
                target_url = goals[index] if goals and goals[index] != "-" else None
                store = stack.enter_context(closing(open_for_reading(url, target_url)))
                lag_source = stack.enter_context(closing(open_lag_source(source[index]))) if source else None
                watcher = TableWatcher(display_name(url), store, config, fleet_record, every=every, source=lag_source)
                watchers.append(stack.enter_context(closing(watcher)))
            if once is not None:
                _write_pages_periodically(watchers, once, every)
                return
            for watcher in watchers:
                watcher.start()
            _serve_pages(watchers, host, port, (*LOOPBACK_HOSTS, host, *(allow_host or ())))


def _write_pages_periodically(watchers: Sequence[TableWatcher], file: Path, every: float) -> None:
    """Read the tables until the status of every lease is known, or for two minutes, and then write the page.

    Raises StoreError if a table cannot be read.
    """
    if not file.parent.is_dir() or file.is_dir():
        raise ValueError(f"--once: {file} cannot be written; name a file in an existing folder")
    deadline = time.monotonic() + LAG_STEPS * LAG_STEP_SECONDS
    while True:
        for watcher in watchers:
            watcher.try_look()
            if watcher.last_state.table is None:
                raise StoreError(f"{watcher.name}: {watcher.last_state.trouble}")
        if time.monotonic() >= deadline or all(watcher.all_statuses_known for watcher in watchers):
            break
        time.sleep(every)
    file.write_text(saved_page(watchers), encoding="utf-8")


def _serve_pages(watchers: Sequence[TableWatcher], host: str, port: int, allowed_hosts: Sequence[str]) -> None:
    page_app = server(watchers, allowed_hosts)
    uvicorn_options = {"log_level": "warning", "access_log": False, "http": BoundedConnection}
    config = uvicorn.Config(page_app, host=host, port=port, timeout_graceful_shutdown=1, **uvicorn_options)  # type: ignore[arg-type]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual_stack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` accepts IPv4 clients, too
    try:  # listen before printing the address, so that a reader of the line can connect at once
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=is_dual_stack)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror or error}; "
            "give an address of this machine, and a port on which nothing listens (0 takes a free one)"
        ) from error
    bound_port = listener.getsockname()[1]
    tables_text = "1 table" if len(watchers) == 1 else f"{len(watchers)} tables"
    uvicorn_server = uvicorn.Server(config)
    # Run uvicorn in another thread, in which it doesn't handle signals. In the main thread, a signal that arrived while
    # uvicorn starts would make it fail, or would be ignored.
    server_errors: list[BaseException] = []
    thread = None
    try:
        thread = spawn("leasehold-page", lambda: uvicorn_server.run([listener]), server_errors.append)
        print(f"http://{host}:{bound_port}/ ({tables_text}); Ctrl-C ends it.", flush=True)
        while thread.is_alive():
            thread.join(SIGNAL_SECONDS)  # the main thread handles signals, whichever thread receives them
    finally:
        uvicorn_server.should_exit = True
        if thread is not None:
            thread.join()
        listener.close()
    if server_errors:
        raise OSError(f"the page cannot be served any more: {error_summary(server_errors[0])}")
