"""The blobs of the retired Event Processor Host, read as leases; nothing is ever written to them.

`<namespace>/<hub>/<group>/<partition>`, or any other folder, each with a JSON body: Owner, Offset,
SequenceNumber. The Host kept its ownership in blob leases, which nothing else shares, so this is a
place to copy checkpoints from and no more.
"""

import json
from collections.abc import Mapping

from attrs import evolve, frozen
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import ContainerClient

from balancer.model import TRIM_HORIZON, Lease, Version
from stores.blob import BlobObjects, asking, one_hub, open_container
from stores.blob_names import read_position, stream_of
from stores.etags import EtagStore
from stores.fields import BadField
from stores.layouts import Part, Parts
from stores.objects import Fields, Stored
from stores.protocol import Promises, StoreError


def open_url(place: str, options: Mapping[str, str], *, create: bool) -> EtagStore:  # noqa: ARG001  nothing is made here
    """The leases at `account/container`, of `eventhub=<namespace>/<hub>&group=…`, or below `prefix`.

    Raises ValueError, StoreError.
    """
    hub = one_hub(options) if "eventhub" in options else None
    folder = "/".join(hub) if hub else options.get("prefix", "").strip("/")
    if not folder:
        raise ValueError("store URL: azblob-eph:// wants eventhub=<namespace>/<hub>, or the folder as prefix")
    client = open_container(place, options.get("endpoint"), create=False)
    return EtagStore(HostObjects(client), HostLayout(folder, stream_of(*hub) if hub else ""))


@frozen
class HostLayout:
    """One folder of the Event Processor Host; names are compared as written, as it did.

    stream  what its leases are of, where that is known
    """

    folder: str
    stream: str = ""

    @property
    def promises(self) -> Promises:
        """Nothing, for nothing is written."""
        return Promises(owner_checked_checkpoint=False, free_notes=False, claims_on_create=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """One blob says everything."""
        return ("ownership",)

    @property
    def owned_before_checkpoint(self) -> bool:
        """There is no other part."""
        return True

    def prefix(self, part: Part) -> str:  # noqa: ARG002  there is one
        """The folder."""
        return f"{self.folder}/"

    def name(self, key: str, part: Part) -> str:
        """The blob of one partition."""
        return self.prefix(part) + key

    def key(self, name: str, part: Part) -> str | None:
        """The partition; None for what lies deeper, such as the blobs of newer processors."""
        partition = name.removeprefix(self.prefix(part))
        return partition if partition.isascii() and partition.isdigit() else None

    def lease(self, key: str, parts: Parts) -> Lease | None:
        """A partition that was never checkpointed says a sequence number of 0 and no offset."""
        if parts.ownership is None:
            return None
        fields = parts.ownership.fields
        if "offset" not in fields or "sequencenumber" not in fields:
            raise BadField("Offset", "the blob is no lease of an Event Processor Host")
        at = read_position(fields, TRIM_HORIZON) if fields["offset"] else TRIM_HORIZON
        return Lease(
            key, stream=self.stream, owner=fields.get("owner") or None, version=Version(parts.etag), checkpoint=at
        )

    def ownership(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """Refused."""
        raise self._refusal(stored, before, after)

    def checkpoint(self, stored: Fields, after: Lease) -> Fields:
        """Refused."""
        raise self._refusal(stored, after)

    def notes(self, stored: Fields, before: Lease, after: Lease) -> Fields:
        """Refused."""
        raise self._refusal(stored, before, after)

    def _refusal(self, *_asked: object) -> StoreError:
        return StoreError("the Event Processor Host's blobs are only read; copy them to another store")


class HostObjects(BlobObjects):
    """Blobs whose bodies say what others say in metadata."""

    def __init__(self, container: ContainerClient) -> None:
        super().__init__(container)
        self._bodies = container

    def list(self, prefix: str) -> tuple[Stored, ...]:
        """All of them, each with its body."""
        found = (self.get(one.name) for one in super().list(prefix))
        return tuple(one for one in found if one)

    def get(self, name: str) -> Stored | None:
        """One of them, with its body."""
        one = super().get(name)
        if one is None:
            return None
        with asking(self._bodies):
            try:
                body = self._bodies.download_blob(name).readall()
            except ResourceNotFoundError:
                return None
        return evolve(one, fields=_fields(body))

    def delete(self, name: str, etag: str) -> bool:  # noqa: ARG002  neither matters
        """Refused."""
        raise StoreError("the Event Processor Host's blobs are only read; delete them by other means")


def _fields(body: bytes) -> Fields:
    """In lower case and without underscores: the Hosts of four languages wrote the names in three ways."""
    try:
        said = json.loads(body.decode("utf-8-sig"))
    except ValueError:
        return {}
    pairs = said.items() if isinstance(said, dict) else ()
    return {name.replace("_", "").lower(): "" if value is None else str(value) for name, value in pairs}
