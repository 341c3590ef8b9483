"""A folder for downloads, filled by one of the processes that want it while the others wait."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).parents[3]


def cache_folder(*, shared: bool = False) -> Path:
    """LEASEHOLD_CACHE if set; `.local` of a checkout, unless all are to share it; else the user's cache folder."""
    if chosen := os.environ.get("LEASEHOLD_CACHE"):
        return Path(chosen).absolute()
    if not shared and (PROJECT / "pyproject.toml").exists():
        return PROJECT / ".local"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leasehold"


def filled(name: str, fill: Callable[[Path], None], *, shared: bool = False) -> Path:
    """The folder `name` of the cache, filled by the first process that asks, while the others wait.

    What takes minutes to make is better `shared` by all checkouts of this user.

    A `fill` that fails leaves the folder unmarked, and the next comer fills it anew.
    """
    folder = cache_folder(shared=shared) / name
    marker = folder / ".filled"
    if marker.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is beside the folder, since a filler may empty it first. A process that ends releases the lock.
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            fill(folder)
            marker.touch()
    return folder
