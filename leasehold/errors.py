"""The errors that users catch, under one base.

Everything here is importable from `leasehold` itself. A bad argument is a ValueError or TypeError as usual, and is none
of these.
"""


class LeaseholdError(Exception):
    """Base class of every error that leasehold raises on purpose.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.StoreError, leasehold.LeaseholdError)
        True
    """


class StoreError(LeaseholdError):
    """The store cannot be used as asked: the table is missing, credentials are wrong, or the request was rejected.

    Examples:
        >>> from leasehold.stores import StoreError, open_store
        >>> try:
        ...     open_store("sqlite:///no/such/folder/leases.db").list()
        ... except StoreError:
        ...     print("refused")
        refused
    """


class OutcomeUnknown(StoreError):
    """The store could not be reached or did not answer: the write may or may not have happened.

    Examples:
        >>> from leasehold.stores import OutcomeUnknown, StoreError
        >>> issubclass(OutcomeUnknown, StoreError)  # the next consistent read is the truth
        True
    """


class SourceError(LeaseholdError):
    """The source cannot be used as asked: there is no such stream, or credentials are wrong.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.SourceError, leasehold.LeaseholdError)
        True
    """


class SourceUnavailable(SourceError):
    """The source could not be reached or throttled the request; trying again later may work.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.SourceUnavailable, leasehold.SourceError)
        True
    """


class Trimmed(SourceError):
    """The source answered, but the position asked for is no longer there, or never was.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.Trimmed, leasehold.SourceError)
        True
    """


class WorkerError(LeaseholdError):
    """The worker must not go on; the message says what is wrong and what to do about it.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.WorkerError, leasehold.LeaseholdError)
        True
    """


class ProducerError(LeaseholdError):
    """A record was not written, as far as is known.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.ProducerError, leasehold.LeaseholdError)
        True
    """


class RecordLate(ProducerError):
    """The record's time to live is over; if the message says so, it may be in the stream all the same.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.RecordLate, leasehold.ProducerError)
        True
    """


class RecordFailed(ProducerError):
    """The record cannot be sent, but others can; if the message says so, it may be in the stream all the same.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.RecordFailed, leasehold.ProducerError)
        True
    """


class DeadLetterError(LeaseholdError):
    """Dead letters cannot be written to, or read from, this place; the message says why.

    Examples:
        >>> import leasehold
        >>> issubclass(leasehold.DeadLetterError, leasehold.LeaseholdError)
        True
    """
