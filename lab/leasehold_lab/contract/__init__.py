"""The contract of lease stores, as a test class that you can run on your own store.

Subclass `StoreContract` in one of your test files, and provide a pytest fixture named `store` that returns a new, empty
store for each test. Each test checks a property that workers rely on. If a store fails a test, records may be lost, or
two workers may read the same shard.
"""

from leasehold_lab.contract.clauses import StoreContract

__all__ = ["StoreContract"]
