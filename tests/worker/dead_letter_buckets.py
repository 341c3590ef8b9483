"""An in-memory bucket for dead letters."""

from attrs import define, field

from leasehold.errors import StoreError


@define
class Bucket:
    """A replacement for `S3Objects` that keeps the objects in memory."""

    opened: list[tuple[str, str | None, str | None]] = field(factory=list)
    there: dict[str, bytes] = field(factory=dict)
    absent: bool = False
    closed: bool = False

    def __call__(self, bucket: str, *, region: str | None, endpoint: str | None, session: object = None) -> "Bucket":
        assert session is None
        self.opened.append((bucket, region, endpoint))
        return self

    def missing(self) -> bool:
        return self.absent

    def put_body(self, name: str, body: bytes) -> None:
        """Store the object, unless an object with this name exists."""
        self.there.setdefault(name, body)

    def names(self, prefix: str) -> tuple[str, ...]:
        if self.closed:
            raise StoreError("the bucket is closed")
        return tuple(name for name in self.there if name.startswith(prefix))

    def body(self, name: str) -> bytes | None:
        """Return the body of the object with this name, or None."""
        return self.there.get(name)

    def remove(self, name: str) -> None:
        self.there.pop(name, None)

    def close(self) -> None:
        self.closed = True
