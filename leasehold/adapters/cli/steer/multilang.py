"""`leasehold multilang`: a MultiLangDaemon without Java, from the command line."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from leasehold.adapters.cli.common.ending import ending
from leasehold.adapters.consuming import consumption
from leasehold.adapters.inputs import dashed
from leasehold.adapters.multilang.children import Children
from leasehold.adapters.multilang.daemon import ChildHandler
from leasehold.adapters.multilang.properties import read_properties, understood_properties
from leasehold.adapters.sources.protocol import SourceError
from leasehold.adapters.worker.holdings import WorkerError
from leasehold.stores.protocol import StoreError

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(help="Run the processors of amazon_kclpy, aws-kcl and the others, without Java.")
def command(  # noqa: PLR0917  one for each option
    file: Annotated[Path | None, typer.Argument(help="The .properties file.", show_default=False)] = None,
    properties_file: Annotated[
        Path | None, typer.Option("--properties-file", "-p", help="The same.", show_default=False)
    ] = None,
    log_configuration: Annotated[
        str | None, typer.Option("--log-configuration", "-l", help="Of Java; ignored.", show_default=False)
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value in place of the file's.")] = None,
    environment: Annotated[bool, typer.Option(help="Take ${NAME} in values from the environment.")] = False,
    attempts: Annotated[int, typer.Option(help="How often a batch is handed over.")] = 5,
    verbose: Annotated[bool, typer.Option(help="Say what is taken and let go.")] = False,
) -> None:
    """Run one worker until it is told to end."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("leasehold").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("leasehold.child").setLevel(logging.DEBUG)
    with ending("multilang", StoreError, SourceError, WorkerError):
        if (file is None) == (properties_file is None):
            raise ValueError("name one file: FILE, or --properties-file FILE")
        path = cast("Path", file or properties_file)
        found = read_properties(path, set_ or (), os.environ if environment else None)
        settings = understood_properties(found)
        print(settings.table(), file=sys.stderr)
        if log_configuration is not None:
            print(f"--log-configuration: {log_configuration} is of Java, and ignored", file=sys.stderr)
        children = Children(settings.argv, most_records=settings.most_records, timeout_seconds=settings.timeout_seconds)
        handler = ChildHandler(children)
        options = settings.options | {"attempts": attempts}
        described = consumption(settings.source, settings.store, handler.handling, options, dashed)
        with handler, described.joined() as joined:
            described.run(joined)
