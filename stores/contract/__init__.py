"""The contract every store keeps, as tests you can run on a store of your own.

Subclass `StoreContract` in a test file of yours and provide a pytest fixture named `store` that
gives a new, empty store to each test. Every test is about what workers may rely on, so a store
that fails one loses records, or lets two workers read one shard.
"""

from stores.contract.checkpoints import Checkpoints
from stores.contract.handoff import Handoff
from stores.contract.ownership import Ownership
from stores.contract.races import Races


class StoreContract(Ownership, Checkpoints, Handoff, Races):
    """All clauses of `stores.protocol`."""


__all__ = ["StoreContract"]
