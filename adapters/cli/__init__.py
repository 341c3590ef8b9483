"""The command line, and its entry point."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

OURS = {"adapters", "stores", "balancer"}


@contextmanager
def imported_for(command: str) -> Iterator[None]:
    """While a command is imported: where a library is missing, say what to install, and end with 2."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] in OURS:
            raise
        print(f"{command}: {missing.name} is not installed; try: pip install 'leasehold[all]'", file=sys.stderr)
        sys.exit(2)


def run() -> None:
    """The entry point; importable where nothing but the library itself is installed."""
    with imported_for("leasehold"):
        from adapters.cli import main  # noqa: PLC0415  an extra
    main.run()
