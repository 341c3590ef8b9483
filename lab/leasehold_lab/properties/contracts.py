"""Creates a test class that checks your own store against the contract of lease stores."""

import inspect
from collections.abc import Callable, Iterator

import pytest

from leasehold.stores.protocol import Store
from leasehold_lab.contract import StoreContract


def leasehold_store_contract(make: Callable[..., Store]) -> type[StoreContract]:
    """Return a test class with the contract of lease stores. Assign it to a name that begins with `Test`.

    Args:
        make: Returns a new, empty store. It is called for each test, and the store is closed after the test. Parameters
            without a default value are the names of pytest fixtures.
    """
    fixture_names = [
        param.name for param in inspect.signature(make).parameters.values() if param.default is param.empty
    ]

    def store(_self: object, request: pytest.FixtureRequest) -> Iterator[Store]:
        new_store = make(*(request.getfixturevalue(name) for name in fixture_names))
        yield new_store
        new_store.close()

    return type(
        "TestStoreContract", (StoreContract,), {"store": pytest.fixture(store), "__doc__": StoreContract.__doc__}
    )
