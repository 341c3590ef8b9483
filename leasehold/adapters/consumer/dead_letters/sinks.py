"""Where dead letters lie, by URL.

file://folder                            a file for each letter; file:///folder is absolute
s3://bucket/prefix?region=…&endpoint=…   an object for each letter
kinesis://stream?region=…&endpoint=…     a record for each letter

Those of AWS take `profile=NAME`, `role_arn=…` and `external_id=…` in place of the environment's credentials.
"""

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from uuid import uuid4

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry, dead_letter_for
from leasehold.adapters.consumer.handling import Delivery
from leasehold.errors import DeadLetterError
from leasehold.stores.urls import AWS, Scheme, endpoint_of, read_url, session_for

if TYPE_CHECKING:  # extras bring these
    from boto3 import Session

    from leasehold.adapters.consumer.dead_letters.stream import StreamSink


_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""The answers of file systems without hard links."""


class DeadLetterSink(Protocol):
    """A place that letters are put into, by many threads at a time."""

    def put(self, dead_letter: DeadLetterEntry) -> None:
        """Store the letter, unless one of its name is there; once this returns it lies there. Raises LetterError."""

    def close(self) -> None:
        """Close all connections."""


class ListedDeadLetters(DeadLetterSink, Protocol):
    """A place that letters can be taken from, too."""

    def names(self) -> tuple[str, ...]:
        """The names of all that lies there, letters or not. Raises LetterError."""

    def get(self, name: str) -> bytes | None:
        """The text of that name; None if it is gone. Raises LetterError."""

    def remove(self, name: str) -> None:
        """Remove the letter of that name, if it is there. Raises LetterError."""


class DeadLetterHandler:
    """A dead letter for `Handling`: each record becomes a letter in the box.

    stream  what the stream is called where leases do not say (a single Kinesis stream)
    table   what the group's lease table is called: two groups that read one stream have letters of their own
    source  where the stream is: two streams of one name have letters of their own
    """

    def __init__(self, sink: DeadLetterSink, *, stream: str = "", table: str = "", source: str = "") -> None:
        self._sink, self._names = sink, {"stream": stream, "table": table, "source": source}

    def __call__(self, delivery: Delivery, error: Exception) -> None:
        """Put the record into the box. Raises LetterError if it could not be written."""
        self._sink.put(dead_letter_for(delivery, error, **self._names, now=time.time()))

    def close(self) -> None:
        """Close all connections."""
        self._sink.close()


class FolderSink:
    """A folder of files, each of one line; a file is complete as soon as it has its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, dead_letter: DeadLetterEntry) -> None:
        """Write the file, and have the disk keep it."""
        unfinished, file = self._folder / f".{uuid4().hex}.unfinished", self._folder / dead_letter.name
        try:
            with unfinished.open("wb") as writing:
                writing.write(dead_letter.line)
                writing.flush()
                # The record is checkpointed as soon as this returns, so its letter must outlive a power failure.
                os.fsync(writing.fileno())
            try:
                # A link, which refuses where a rename would replace: the letter that is there under this name stays.
                file.hardlink_to(unfinished)
            except FileExistsError:
                if not file.is_file():
                    raise
            except OSError as fault:
                if fault.errno not in _NO_LINKS:
                    raise
                unfinished.replace(file)  # a letter of this name is one of the same record
            unfinished.unlink(missing_ok=True)
            # The name, too, must be on the disk: a file without one is lost.
            self._keep()
        except OSError as fault:
            unfinished.unlink(missing_ok=True)
            raise DeadLetterError(f"no letter could be written: {fault}") from fault

    def names(self) -> tuple[str, ...]:
        """The files of the folder; hidden ones are unfinished."""
        try:
            return tuple(each.name for each in self._folder.iterdir() if not each.name.startswith("."))
        except OSError as fault:
            raise DeadLetterError(f"no letters could be listed: {fault}") from fault

    def get(self, name: str) -> bytes | None:
        """Read the file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise DeadLetterError(f"a letter could not be read: {fault}") from fault

    def remove(self, name: str) -> None:
        """Remove the file, and have the disk know."""
        try:
            (self._folder / name).unlink(missing_ok=True)
            # Else it may be there again after a power failure, and its record be handed over once more.
            self._keep()
        except OSError as fault:
            raise DeadLetterError(f"a letter could not be removed: {fault}") from fault

    def close(self) -> None:
        """Nothing to close."""

    def _keep(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_SCHEMES = {
    "file": Scheme("leasehold.adapters.consumer.dead_letters.sinks"),
    "s3": Scheme("leasehold.adapters.consumer.dead_letters.objects", AWS, "aws"),
    "kinesis": Scheme("leasehold.adapters.consumer.dead_letters.stream", AWS, "aws"),
}
STREAMS = frozenset({"kinesis"})
"""Schemes of streams: nothing can be taken out of one."""


def open_url(place: str, _options: Mapping[str, str], *, create: bool) -> FolderSink:
    """The folder of this name, made if there is none and `create` says so. Raises ValueError, LetterError."""
    if not place:
        raise ValueError("letters URL: it names no folder; write file://folder or file:///folder")
    try:
        if create:
            Path(place).mkdir(parents=True, exist_ok=True)
        # A name with a mistake in it must not pass for a folder without letters.
        elif not Path(place).is_dir():
            raise DeadLetterError(f"there is no folder {place!r}")
    except OSError as fault:
        raise DeadLetterError(f"letters cannot be kept there: {fault}") from fault
    return FolderSink(Path(place))


def dead_letters(
    url: str, *, stream: str = "", table: str = "", source: str = "", session: "Session | None" = None
) -> DeadLetterHandler:
    """The dead letter, for `Handling`, that keeps records at this URL: file://, s3:// or kinesis://.

    stream, table, source  as of `DeadLetterHandler`
    session                of boto3's, with the credentials for a URL of AWS; None: the URL's, or the environment's
    Raises ValueError, naming what is wrong and never repeating the URL, and LetterError if there is no such place.

    Examples:
        >>> import tempfile
        >>> from leasehold.adapters import dead_letters
        >>> callable(dead_letters(f"file://{tempfile.mkdtemp()}", source="kinesis://orders"))
        True
    """
    sink = _opened(url, "dead letter", create=True, session=session)
    return DeadLetterHandler(sink, stream=stream, table=table, source=source)


def open_dead_letters(url: str) -> ListedDeadLetters:
    """The letters at this URL, to be taken out again. Raises ValueError, and LetterError if there is no such place."""
    # A stream keeps no position for its readers, and nothing can be removed from it.
    scheme = url.partition("://")[0]
    if scheme in STREAMS:
        raise ValueError("letters URL: letters in a stream want --store, where the replay keeps how far it has come")
    return cast("ListedDeadLetters", _opened(url, "letters", create=False))


def open_stream(url: str) -> "StreamSink":
    """The stream at this URL, to put records or letters into. Raises ValueError, and LetterError if there is none."""
    if not url.startswith("kinesis://"):
        raise ValueError("stream URL: records can be put back into kinesis://STREAM")
    return cast("StreamSink", _opened(url, "stream", create=False))


def _opened(url: str, kind: str, *, create: bool, session: "Session | None" = None) -> DeadLetterSink:
    scheme, place, options = read_url(url, kind, _SCHEMES)
    endpoint_of(options.get("endpoint"), f"{kind} URL")
    told = session_for(_SCHEMES[scheme], session, f"{kind} URL")
    sink: DeadLetterSink = (
        _SCHEMES[scheme].load("dead letter", DeadLetterError).open_url(place, options, create=create, **told)
    )
    return sink
