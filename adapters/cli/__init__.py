"""The command line, and its entry point."""

import sys


def run() -> None:
    """Call what was named; or say what to install, where nothing of the command line is there."""
    try:
        from adapters.cli.main import run as called  # noqa: PLC0415  an extra
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "adapters":
            raise
        print(f"leasehold: {missing.name} is not installed; try: pip install 'leasehold[all]'", file=sys.stderr)
        sys.exit(2)
    called()
