"""The contract of stores for a store of one's own, in one line of a test file."""

import inspect
from collections.abc import Callable, Iterator

import pytest

from leasehold.stores.protocol import Store
from leasehold_lab.contract import StoreContract


def leasehold_store_contract(make: Callable[..., Store]) -> type[StoreContract]:
    """Every clause of the contract, as a class of tests that a file gives a name beginning with `Test`.

    make  gives each test a new, empty store, which is closed afterwards; its parameters without a default are pytest
          fixtures, by name
    """
    wanted = [each.name for each in inspect.signature(make).parameters.values() if each.default is each.empty]

    def store(_self: object, request: pytest.FixtureRequest) -> Iterator[Store]:
        opened = make(*(request.getfixturevalue(name) for name in wanted))
        yield opened
        opened.close()

    return type(
        "TestStoreContract", (StoreContract,), {"store": pytest.fixture(store), "__doc__": StoreContract.__doc__}
    )
