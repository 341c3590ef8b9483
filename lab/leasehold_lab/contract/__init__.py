"""The contract that every store keeps, as tests to run on a store of your own.

Subclass `StoreContract` in one of your test files, and provide a pytest fixture named `store` that gives each test a
new, empty store. Every test covers something that workers rely on: a store that fails one may lose records, or let two
workers read the same shard.
"""

from leasehold_lab.contract.clauses import StoreContract

__all__ = ["StoreContract"]
