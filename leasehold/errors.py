"""The exceptions that leasehold raises, with a common base class.

The exceptions in this module can also be imported from `leasehold`. Invalid arguments raise ValueError or TypeError
instead.
"""


class LeaseholdError(Exception):
    """Base class of every error that leasehold raises on purpose.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.StoreError, leasehold.LeaseholdError)
        True
    """


class StoreError(LeaseholdError):
    """Raised when a store cannot be used because of a missing table, wrong credentials or a rejected request.

    Examples:
        >>> from leasehold.stores import StoreError, open_store
        >>> try:
        ...     open_store("sqlite:///no/such/folder/leases.db").list()
        ... except StoreError:
        ...     print("refused")
        refused
    """


class OutcomeUnknown(StoreError):
    """Raised when the store could not be reached or did not respond, so a write may or may not have happened.

    The next consistent read shows whether the write happened.

    Examples:
        >>> from leasehold.stores import OutcomeUnknown, StoreError
        >>> issubclass(OutcomeUnknown, StoreError)  # the next consistent read is the truth
        True
    """


class NotWritten(OutcomeUnknown):
    """Raised when the store responded that it cannot write now, for example because its disk is full.

    Nothing was written. Trying again may help.

    Examples:
        >>> from leasehold.errors import NotWritten, OutcomeUnknown
        >>> issubclass(NotWritten, OutcomeUnknown)  # callers that don't know it read again, which is never wrong
        True
    """


class SourceError(LeaseholdError):
    """Raised when a source cannot be used, for example because the stream does not exist or credentials are wrong.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.SourceError, leasehold.LeaseholdError)
        True
    """


class SourceUnavailable(SourceError):
    """Raised when the source could not be reached or throttled the request. Retrying later may work.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.SourceUnavailable, leasehold.SourceError)
        True
    """


class Trimmed(SourceError):
    """Raised when the requested position no longer exists in the source, or never existed.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.Trimmed, leasehold.SourceError)
        True
    """


class WorkerError(LeaseholdError):
    """Raised when the worker must stop. The message describes the problem and the remedy.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.WorkerError, leasehold.LeaseholdError)
        True
    """


class ProducerError(LeaseholdError):
    """Raised when a record was not written, or when its write was not confirmed.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.ProducerError, leasehold.LeaseholdError)
        True
    """


class RecordLate(ProducerError):
    """Raised when a record's time to live has expired.

    If the record may have been written anyway, the message says so.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.RecordLate, leasehold.ProducerError)
        True
    """


class RecordFailed(ProducerError):
    """Raised when one record cannot be sent, although others can.

    If the record may have been written anyway, the message says so.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.RecordFailed, leasehold.ProducerError)
        True
    """


class DeadLetterError(LeaseholdError):
    """Raised when dead letters cannot be written to or read from a location. The message contains the reason.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.DeadLetterError, leasehold.LeaseholdError)
        True
    """
