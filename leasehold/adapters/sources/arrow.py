"""Says which extra brings pyarrow, to those who want columns without it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def wanted() -> Iterator[None]:
    """Around the import of what needs pyarrow. Raises ModuleNotFoundError, naming the extra."""
    try:
        yield
    except ModuleNotFoundError as missing:
        what = f"batch.to_arrow() needs {missing.name}; install leasehold[arrow]"
        raise ModuleNotFoundError(what, name=missing.name) from missing
