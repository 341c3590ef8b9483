"""Whether a service of objects keeps its conditions: asked once by every store that is opened for writing.

Each opening writes an object of its own and removes it again, so that any number may ask at once. It
lies in a folder beside those of the leases, where no layout and no official worker looks.
"""

from contextlib import suppress
from uuid import uuid4

from leasehold.stores.objects.requests import Objects
from leasehold.stores.protocol import StoreError

FOLDER = "probe/"


def prove(objects: Objects, above: str) -> None:
    """Return if the service keeps all conditions that leases rest on; `above` is their folder, with its slash.

    Raises StoreError if it does not, OutcomeUnknown if it cannot be reached.
    """
    name = f"{above}{FOLDER}{uuid4().hex}"
    try:
        broken = _broken(objects, name)
    except StoreError:
        _clear(objects, name)
        raise
    if broken:
        _clear(objects, name)
        raise StoreError(
            f"the service {broken}, so two workers could own one lease; "
            "leases need a service with conditional writes and deletions"
        )


def _broken(objects: Objects, name: str) -> str | None:
    """The condition that the service does not keep, or None; after None the object is gone."""
    first = objects.put_new(name, {"probe": "1"})
    if first is None:
        return "refuses a new object under If-None-Match: *"
    if objects.put_new(name, {"probe": "2"}) is not None:
        return "ignores If-None-Match: * on a write"
    second = objects.put_over(name, {"probe": "3"}, first)
    if second is None or second == first:
        return "refuses a write whose If-Match holds" if second is None else "gives new content an old ETag"
    if objects.put_over(name, {"probe": "4"}, first) is not None:
        return "ignores If-Match on a write"
    if objects.delete(name, first):
        return "ignores If-Match on a deletion"
    return None if objects.delete(name, second) else "refuses a deletion whose If-Match holds"


def _clear(objects: Objects, name: str) -> None:
    with suppress(StoreError):  # the fault of the service has been found already
        left = objects.get(name)
        if left:
            objects.delete(name, left.etag)
