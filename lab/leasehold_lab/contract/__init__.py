"""The contract every store keeps, as tests you can run on a store of your own.

Subclass `StoreContract` in a test file of yours and provide a pytest fixture named `store` that
gives a new, empty store to each test. Every test is about what workers may rely on, so a store
that fails one loses records, or lets two workers read one shard.
"""

from leasehold_lab.contract.clauses import StoreContract

__all__ = ["StoreContract"]
