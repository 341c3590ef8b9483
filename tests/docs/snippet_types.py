"""Checks the Python code in README and docs/ with pyright, as an editor does, in its basic and strict modes."""

import json
import shutil
import subprocess
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

from pages import PAGES, ROOT, blocks

from leasehold.adapters.toolchain import fill_once
from leasehold_lab.standins.node import find_node, install_packages

PYRIGHT_PACKAGE = ROOT / "tests" / "javascript" / "pyright"
SNIPPETS_FOLDER = ROOT / "build" / "snippets"
MODES = ("basic", "strict")
UNTYPED = ("boto3", "pyarrow")
"""Libraries without types. Programs that import them are not checked in the strict mode."""


def _pyright() -> list[str]:
    lock = (PYRIGHT_PACKAGE / "package-lock.json").read_bytes()
    folder = fill_once(f"node/pyright-{sha256(lock).hexdigest()[:12]}", partial(install_packages, PYRIGHT_PACKAGE))
    return [*find_node().node, str(folder / "node_modules" / "pyright" / "index.js")]


def write(folder: Path) -> dict[Path, str]:
    """Write the programs of each page into a folder, as a reader saves them. Return the page of each folder.

    A program's line numbers are those of the page, so the lines between blocks are empty.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folders: dict[Path, str] = {}
    for page in PAGES:
        files: dict[str, list[str]] = {}
        for block in blocks(page):
            if block.kind == "python":
                lines = files.setdefault(block.file or "session.py", [])
                lines += [""] * (block.line - len(lines)) + block.text.splitlines()
        page_folder = folder / page.replace("/", "_").removesuffix(".md")
        for name, lines in files.items():
            page_folder.mkdir(parents=True, exist_ok=True)
            (page_folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
            folders[page_folder] = page
    return folders


def find_type_errors(mode: str, folders: dict[Path, str]) -> list[str]:
    """Return the errors that pyright finds in this mode."""
    project = {
        "typeCheckingMode": mode,
        "pythonVersion": "3.11",
        "reportDuplicateImport": False,  # each block of a page has its own imports
        "executionEnvironments": [
            {"root": str(page_folder), "extraPaths": [str(ROOT), str(ROOT / "lab")]} for page_folder in folders
        ],
    }
    (SNIPPETS_FOLDER / "pyrightconfig.json").write_text(json.dumps(project))
    command = [*_pyright(), "--outputjson", "--pythonpath", sys.executable, "--project", str(SNIPPETS_FOLDER)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        diagnostics = json.loads(completed.stdout)["generalDiagnostics"]
    except ValueError:
        raise SystemExit(f"pyright could not be run: {completed.stdout}{completed.stderr}") from None
    return [
        f"{folders[Path(issue['file']).parent]}:{issue['range']['start']['line'] + 1} ({mode}): {issue['message']}"
        for issue in diagnostics
        if issue["severity"] == "error" and not (mode == "strict" and _imports_untyped_library(Path(issue["file"])))
    ]


def _imports_untyped_library(file: Path) -> bool:
    return any(f"import {library}\n" in file.read_text(encoding="utf-8") for library in UNTYPED)


def main() -> None:
    """Check the programs, and exit with 1 if there are errors."""
    folders = write(SNIPPETS_FOLDER)
    errors = [line for mode in MODES for line in find_type_errors(mode, folders)]
    sys.exit("\n".join(errors) or None)


if __name__ == "__main__":
    main()
