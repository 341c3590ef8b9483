# The functions of scan.c, if it is compiled.

from collections.abc import Iterator
from typing import Any

def viewed(body: bytes | bytearray) -> tuple[bytes, bytes, bytes, bytes, bool, int, int] | None: ...
def columns(
    body: bytes | bytearray, datas: bytes, numbers: bytes, keys: bytes, arrived: bytes
) -> tuple[list[bytes], list[str], list[str], list[float]]: ...
def records(kind: type[tuple[Any, ...]], *columns: list[Any]) -> Iterator[Any]: ...
