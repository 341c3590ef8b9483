"""Measures the installed size of the library, alone and with each of its extras, at locked versions."""

import sys
import tempfile
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from releasing import ROOT, installed, plain

ALONE = ""
WORKERS = ("aws,cli", "azure,cli")


def size(folder: Path) -> float:
    """Return the size of a folder's files in MiB, including the bytecode that pip compiles."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files) / 2**20


def main() -> None:
    """Print a row for each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    options = ("--compile-bytecode", "-c", str(ROOT / "requirements.lock"))
    with tempfile.TemporaryDirectory() as folder_path:
        _, wheel = plain(Path(folder_path))
        print(
            f"| installed, Python {sys.version_info.major}.{sys.version_info.minor} | MiB | packages |\n|---|---|---|"
        )
        for extras in (ALONE, *WORKERS, *project["optional-dependencies"]):
            folder = Path(folder_path) / (extras or "alone")
            installed(wheel, extras, Path(sys.executable), folder, *options)
            (packages,) = folder.glob("lib/python*/site-packages")
            count = len(list(packages.glob("*.dist-info")))
            print(f"| `leasehold{f'[{extras}]' if extras else ''}` | {size(packages):.0f} | {count} |", flush=True)


if __name__ == "__main__":
    main()
