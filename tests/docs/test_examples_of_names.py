"""Tests that each public name has an example in its docstring, and that the example runs."""

import doctest
import inspect

import pytest

import leasehold
from leasehold import adapters, balancer, stores

STREAM_FUNCTIONS = {"arun", "produce", "read", "run", "worker"}
"""The functions of `leasehold` that need a stream. `tests/worker/test_front_door.py` runs their examples."""
STREAM_CLASSES = {"ShardConsumer"}
"""Classes that need a stream. `tests/worker/test_acknowledging.py` runs their examples."""

NAMES = [
    (module, name)
    for module in (balancer, stores, adapters, leasehold)
    for name in module.__all__
    if name not in STREAM_CLASSES
    and not (module is leasehold and (name in STREAM_FUNCTIONS or name in balancer.__all__))
    and (inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name)))
]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module.__name__}.{name}" for module, name in NAMES])
def test_each_public_name_has_an_example_that_runs(module: object, name: str) -> None:
    (doctested,) = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name, globs={})
    assert doctested.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(doctested).failed == 0
