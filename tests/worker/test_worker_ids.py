"""Worker ids that the store cannot hold are rejected when the worker is created, and not at each claim."""

import pytest

from leasehold.adapters.worker.worker import check_worker_id
from leasehold.stores.objects.event_hubs_layout import EventHubLayout
from leasehold.stores.protocol import Capabilities

ODD_WORKER_IDS = ("caf\u00e9-1", "worker 1", " worker", "a\nb", "\u4e2d" * 300)


@pytest.mark.parametrize("me", [None, b"worker", 7, "", "a\ud800b", "a\0b"])
def test_worker_id_that_no_store_holds_is_rejected(me: object) -> None:
    """Lone surrogates cannot be encoded as UTF-8, and PostgreSQL's strings cannot contain NUL."""
    with pytest.raises(ValueError, match=r"^worker: "):
        check_worker_id(me, Capabilities())


@pytest.mark.parametrize("me", ODD_WORKER_IDS)
def test_worker_id_of_any_characters_is_accepted_except_in_http_headers(me: str) -> None:
    """The layout of the Azure SDKs stores the owner in the metadata of a blob, which is sent as HTTP headers."""
    check_worker_id(me, Capabilities())
    if me == "worker 1":
        check_worker_id(me, EventHubLayout.capabilities)
        return
    with pytest.raises(ValueError, match=r"worker: .* printable ASCII"):
        check_worker_id(me, EventHubLayout.capabilities)
