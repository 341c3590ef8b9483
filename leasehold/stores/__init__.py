"""Stores for leases. Each store implements the `Store` protocol, whose writes are conditional (compare-and-swap)."""

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.execute import execute
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Outcome, Store
from leasehold.stores.swap import open_both
from leasehold.stores.urls import open_store
from leasehold.stores.writes import (
    AnnotateLease,
    CheckpointLate,
    CheckpointLease,
    ClaimLease,
    CreateLease,
    DeleteLease,
    GiveLease,
    ReleaseLease,
    RenewLease,
    RequestLease,
    StealLease,
    TakeBackLease,
    WithdrawRequest,
    Write,
)

__all__ = [
    "AnnotateLease",
    "Capabilities",
    "CheckpointLate",
    "CheckpointLease",
    "ClaimLease",
    "CreateLease",
    "DeleteLease",
    "Done",
    "GiveLease",
    "Listing",
    "Lost",
    "Outcome",
    "OutcomeUnknown",
    "ReleaseLease",
    "RenewLease",
    "RequestLease",
    "StealLease",
    "Store",
    "StoreError",
    "TakeBackLease",
    "WithdrawRequest",
    "Write",
    "execute",
    "open_both",
    "open_store",
]
