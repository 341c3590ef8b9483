"""An in-memory bucket that logs its calls. A test can make its calls fail, or write just before a call."""

from collections.abc import Callable
from itertools import count

from attrs import define, field

from leasehold.errors import OutcomeUnknown
from leasehold.stores.requests import ObjectFields, StoredObject


@define
class ObjectMemory:
    """Objects with ETags.

    Attributes:
        log: Each call, as the verb and the last two parts of the object's name.
        before: Called with each line of the log, before the call is carried out.
        mute: Verbs of writes that are applied, but whose responses are lost.
    """

    stored: dict[str, StoredObject] = field(factory=dict)
    log: list[str] = field(factory=list)
    before: Callable[[str], None] = lambda _line: None
    mute: frozenset[str] = frozenset()
    etags: "count[int]" = field(factory=lambda: count(1))

    def list(self, prefix: str) -> tuple[StoredObject, ...]:
        self._ask("list", prefix.rstrip("/"))
        return tuple(entry for name, entry in sorted(self.stored.items()) if name.startswith(prefix))

    def get(self, name: str) -> StoredObject | None:
        self._ask("get", name)
        return self.stored.get(name)

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Store the object only if none exists."""
        self._ask("new", name)
        return self._put("new", name, fields) if name not in self.stored else None

    def put_if_match(self, name: str, fields: ObjectFields, etag: str) -> str | None:
        self._ask("over", name)
        current = self.stored.get(name)
        return self._put("over", name, fields) if current and current.etag == etag else None

    def delete(self, name: str, etag: str) -> bool:
        self._ask("delete", name)
        current = self.stored.get(name)
        if current and current.etag == etag:
            del self.stored[name]
        return name not in self.stored

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""

    def _ask(self, verb: str, name: str) -> None:
        line = f"{verb} {'/'.join(name.split('/')[-2:])}"
        self.before(line)
        self.log.append(line)

    def _put(self, verb: str, name: str, fields: ObjectFields) -> str:
        etag = f"e-{next(self.etags)}"
        self.stored[name] = StoredObject(name, etag, fields)
        if verb in self.mute:
            raise OutcomeUnknown("the reply was lost")
        return etag
