"""Applies the contract of stores to a store of your own, in one line of a test file."""

import inspect
from collections.abc import Callable, Iterator

import pytest

from leasehold.stores.protocol import Store
from leasehold_lab.contract import StoreContract


def leasehold_store_contract(make: Callable[..., Store]) -> type[StoreContract]:
    """Return the contract of stores as a test class, to be assigned to a name that begins with `Test`.

    Args:
        make: Returns a new, empty store for each test, which is closed afterwards. Its parameters without a default
            are the names of pytest fixtures.
    """
    needed = [param.name for param in inspect.signature(make).parameters.values() if param.default is param.empty]

    def store(_self: object, request: pytest.FixtureRequest) -> Iterator[Store]:
        opened = make(*(request.getfixturevalue(name) for name in needed))
        yield opened
        opened.close()

    return type(
        "TestStoreContract", (StoreContract,), {"store": pytest.fixture(store), "__doc__": StoreContract.__doc__}
    )
