"""Which cases of a long table `make test` runs; `make test-more` runs the others."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any], name: Callable[[Any], str] = str) -> list[Any]:
    """Mark all but one case of every `step` for `make test-more`.

    A tuple is the arguments of one case. With a step that no length of the table's columns divides, every value of
    every column is in the sample.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id="-".join(map(str, case)) if isinstance(case, tuple) else name(case),
            marks=[pytest.mark.more] * (place % step != 0),
        )
        for place, case in enumerate(cases)
    ]
