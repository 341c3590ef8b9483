"""Opens the sink at a URL. A sink stores dead letters.

file://folder                            one file per dead letter; file:///folder is absolute
s3://bucket/prefix?region=…&endpoint=…   one object per dead letter
kinesis://stream?region=…&endpoint=…     one record per dead letter

The AWS URLs accept `profile=NAME`, `role_arn=…` and `external_id=…`, which replace the environment's credentials.
"""

import errno
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from uuid import uuid4

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry, dead_letter_for
from leasehold.adapters.consumer.handling import Delivery
from leasehold.errors import DeadLetterError
from leasehold.stores.urls import AWS_OPTIONS, Scheme, check_endpoint, session_argument, split_url

if TYPE_CHECKING:  # these packages are optional
    from boto3 import Session

    from leasehold.adapters.consumer.dead_letters.stream import StreamSink


_NO_LINK_ERRNOS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""The error numbers with which creating a hard link fails on file systems that do not support hard links."""


class DeadLetterSink(Protocol):
    """Stores dead letters. Many threads may use it at the same time."""

    def put(self, dead_letter: DeadLetterEntry) -> None:
        """Store the dead letter durably, unless one with the same name exists. Raises DeadLetterError."""

    def close(self) -> None:
        """Close all connections."""


class ListedDeadLetters(DeadLetterSink, Protocol):
    """A sink whose dead letters can also be listed, read and removed."""

    def names(self) -> tuple[str, ...]:
        """List all names, including those of files that are not dead letters. Raises DeadLetterError."""

    def get(self, name: str) -> bytes | None:
        """Return the content of this dead letter, or None if it no longer exists. Raises DeadLetterError."""

    def remove(self, name: str) -> None:
        """Remove the dead letter of this name, if it exists. Raises DeadLetterError."""


class DeadLetterHandler:
    """A `dead_letter` for `Handling` that stores each record in a sink.

    Args:
        sink: The sink.
        stream: The stream's name, used if leases do not contain it (a single Kinesis stream).
        table: Identifies the group's lease table, so that two groups that read the same stream do not share dead
            letters.
        source: Identifies the stream, so that two streams of the same name do not share dead letters.
        name: The URL of the sink without options, for errors.
    """

    def __init__(
        self, sink: DeadLetterSink, *, stream: str = "", table: str = "", source: str = "", name: str = "its sink"
    ) -> None:
        self._sink, self._names, self._name = sink, {"stream": stream, "table": table, "source": source}, name

    def __call__(self, delivery: Delivery, error: Exception) -> None:
        """Store the record. If this fails, raises a DeadLetterError that names the sink."""
        try:
            self._sink.put(dead_letter_for(delivery, error, **self._names, now=time.time()))
        except DeadLetterError as fault:
            raise DeadLetterError(f"{self._name}: {fault}") from fault

    def close(self) -> None:
        """Close all connections."""
        self._sink.close()


class FolderSink:
    """Stores each dead letter in a folder, as a file of one line. A file gets its final name when it is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, dead_letter: DeadLetterEntry) -> None:
        """Write the file durably."""
        unfinished_file, final_file = self._folder / f".{uuid4().hex}.unfinished", self._folder / dead_letter.name
        try:
            with unfinished_file.open("wb") as stream:
                stream.write(dead_letter.line)
                stream.flush()
                # The record is checkpointed as soon as `put` returns, so the dead letter must survive a power failure.
                os.fsync(stream.fileno())
            try:
                # Use `os.link`, which fails if the name exists. A rename would overwrite the existing dead letter.
                final_file.hardlink_to(unfinished_file)
            except FileExistsError:
                if not final_file.is_file():
                    raise
            except OSError as fault:
                if fault.errno not in _NO_LINK_ERRNOS:
                    raise
                unfinished_file.replace(final_file)  # an existing file of this name holds the same record
            unfinished_file.unlink(missing_ok=True)
            # Write the directory entry to disk, too. Otherwise, the file could be lost in a power failure.
            self._sync_folder()
        except OSError as fault:
            with suppress(OSError):
                unfinished_file.unlink(missing_ok=True)
            # Use only a part of the message, because the rest contains the name of the unfinished file.
            raise DeadLetterError(f"the dead letter could not be written: {fault.strerror or fault}") from fault

    def names(self) -> tuple[str, ...]:
        """List the files of the folder. Hidden files are skipped, because they are still being written."""
        try:
            return tuple(file.name for file in self._folder.iterdir() if not file.name.startswith("."))
        except OSError as fault:
            raise DeadLetterError(f"the dead letters could not be listed: {fault}") from fault

    def get(self, name: str) -> bytes | None:
        """Read the file."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as fault:
            raise DeadLetterError(f"a dead letter could not be read: {fault}") from fault

    def remove(self, name: str) -> None:
        """Remove the file durably."""
        try:
            (self._folder / name).unlink(missing_ok=True)
            # Write the removal to disk. Otherwise, the file might reappear after a power failure, and its record would
            # be replayed again.
            self._sync_folder()
        except OSError as fault:
            raise DeadLetterError(f"a dead letter could not be removed: {fault}") from fault

    def close(self) -> None:
        """Do nothing, because a folder has no connection to close."""

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_SCHEMES = {
    "file": Scheme("leasehold.adapters.consumer.dead_letters.sinks"),
    "s3": Scheme("leasehold.adapters.consumer.dead_letters.objects", AWS_OPTIONS, "aws"),
    "kinesis": Scheme("leasehold.adapters.consumer.dead_letters.stream", AWS_OPTIONS, "aws"),
}
STREAMS = frozenset({"kinesis"})
"""The URL schemes of streams, from which dead letters cannot be removed."""


def open_url(folder_name: str, _options: Mapping[str, str], *, create: bool) -> FolderSink:
    """Open the folder of this name, creating it first if `create` is true.

    Raises ValueError if the name is empty, and DeadLetterError if the folder does not exist or cannot be created.
    """
    if not folder_name:
        raise ValueError("letters URL: it names no folder; write file://folder or file:///folder")
    try:
        if create:
            Path(folder_name).mkdir(parents=True, exist_ok=True)
        # Reject a folder that does not exist. Otherwise, a misspelled name would look like a folder without dead
        # letters.
        elif not Path(folder_name).is_dir():
            raise DeadLetterError(f"there is no folder {folder_name!r}")
    except OSError as fault:
        raise DeadLetterError(f"dead letters cannot be stored there: {fault}") from fault
    return FolderSink(Path(folder_name))


def dead_letters(
    url: str, *, stream: str = "", table: str = "", source: str = "", session: "Session | None" = None
) -> DeadLetterHandler:
    """Return a `dead_letter` for `Handling` that stores records at this URL: file://, s3:// or kinesis://.

    Args:
        url: The URL.
        stream: The stream's name, used if leases do not contain it (a single Kinesis stream).
        table: Identifies the group's lease table, as for `DeadLetterHandler`.
        source: Identifies the stream, as for `DeadLetterHandler`.
        session: A boto3 session with the credentials for a URL of AWS; by default those of the URL or of the
            environment.

    Raises:
        ValueError: The URL is wrong. The message says why and never repeats the URL.
        DeadLetterError: There is no such bucket or stream, or the folder cannot be created.

    Examples:
        >>> import tempfile
        >>> from leasehold.adapters import dead_letters
        >>> callable(dead_letters(f"file://{tempfile.mkdtemp()}", source="kinesis://orders"))
        True
    """
    sink = _open_sink(url, "dead letter", create=True, session=session)
    scheme, location, _ = split_url(url, "dead letter", _SCHEMES)
    return DeadLetterHandler(sink, stream=stream, table=table, source=source, name=f"{scheme}://{location}")


def open_dead_letters(url: str) -> ListedDeadLetters:
    """Open the dead letters at this URL for a replay.

    Raises ValueError if the URL is wrong, and DeadLetterError if the dead letters cannot be opened.
    """
    # A stream does not store its readers' positions, and dead letters cannot be removed from it.
    scheme = url.partition("://")[0]
    if scheme in STREAMS:
        raise ValueError("letters URL: dead letters in a stream need --store, in which the replay stores its position")
    return cast("ListedDeadLetters", _open_sink(url, "letters", create=False))


def open_stream(url: str) -> "StreamSink":
    """Open the stream at this URL for writing.

    Raises ValueError if the URL is wrong, and DeadLetterError if the stream does not exist.
    """
    if not url.startswith("kinesis://"):
        raise ValueError("stream URL: records can be put back into kinesis://STREAM")
    return cast("StreamSink", _open_sink(url, "stream", create=False))


def _open_sink(url: str, kind: str, *, create: bool, session: "Session | None" = None) -> DeadLetterSink:
    scheme, location, options = split_url(url, kind, _SCHEMES)
    check_endpoint(options.get("endpoint"), f"{kind} URL")
    session_arguments = session_argument(_SCHEMES[scheme], session, f"{kind} URL")
    sink: DeadLetterSink = (
        _SCHEMES[scheme]
        .load("dead letter", DeadLetterError)
        .open_url(location, options, create=create, **session_arguments)
    )
    return sink
