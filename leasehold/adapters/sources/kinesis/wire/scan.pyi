# What scan.c has, where it is compiled: the functions of views.py, and records made as they are asked for.

from collections.abc import Iterator
from typing import Any

from leasehold.adapters.sources.kinesis.wire.views import Viewed

def viewed(body: bytes | bytearray) -> Viewed | None: ...
def columns(
    body: bytes | bytearray, datas: bytes, numbers: bytes, keys: bytes, arrived: bytes
) -> tuple[list[bytes], list[str], list[str], list[float]]: ...
def records(kind: type[tuple[Any, ...]], *columns: list[Any]) -> Iterator[Any]: ...
