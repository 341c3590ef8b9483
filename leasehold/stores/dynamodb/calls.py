"""The calls to DynamoDB: two clients, and the meaning of each kind of failure.

Rule 1: a conditional write is sent once. A client that repeats one whose reply was lost meets its
own first attempt as a conflict, and reports as taken by a stranger what it has just taken itself.
So a lost reply is an unknown outcome, and the caller's next consistent reading tells.
Rule 2: what was refused for want of throughput has certainly not been applied, and is sent again.
Rule 3: readings may be repeated, and are, by botocore's own standard mode.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, frozen
from boto3 import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from leasehold.stores.dynamodb.listings import read_listings_quickly
from leasehold.stores.endpoints import without_credentials
from leasehold.stores.patience import Patience
from leasehold.stores.printable import said
from leasehold.stores.protocol import OutcomeUnknown, StoreError

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

T = TypeVar("T")

ATTEMPTS = 3
PATIENCE = Patience(connect_seconds=2, read_seconds=5, attempts=ATTEMPTS)
"""Short enough for several tries within one lease, long enough for a page of a scan (1 MB)."""

THROTTLED = frozenset(
    {"ProvisionedThroughputExceededException", "ThrottlingException", "Throttling", "RequestLimitExceeded"}
)

ADVICE = {
    "ResourceNotFoundException": "there is no such table here; check its name, the region and the endpoint",
    "AccessDeniedException": (
        "these credentials may not do this (dynamodb:{asked}); a worker needs DescribeTable, Scan, BatchGetItem, "
        "PutItem, UpdateItem and DeleteItem, and CreateTable to make the table; tools that only read need the first two"
    ),
    "UnrecognizedClientException": "the credentials are not known to this endpoint; check them and the region",
    "InvalidSignatureException": "the secret key does not fit the access key, or the clock is wrong",
    "MissingAuthenticationTokenException": "no credentials were sent; set them in the environment",
    "IncompleteSignatureException": "the credentials are not whole; check them in the environment",
    "ExpiredTokenException": "the session token has expired; fetch new credentials",
}


@frozen
class Clients:
    """The clients, one for readings and another for writes; many threads may use both."""

    reads: "DynamoDBClient"
    writes: "DynamoDBClient"

    def close(self) -> None:
        """Close all connections."""
        self.reads.close()
        self.writes.close()


def connect(session: Session, region: str | None, endpoint: str | None, patience: Patience = PATIENCE) -> Clients:
    """Clients of this region or endpoint. Raises StoreError where no region is set anywhere."""

    def client(patience: Patience) -> "DynamoDBClient":
        config = Config(
            retries={"mode": "standard", "total_max_attempts": patience.attempts},
            connect_timeout=patience.connect_seconds,
            read_timeout=patience.read_seconds,
            max_pool_connections=64,
        )
        made = session.client("dynamodb", region_name=region, endpoint_url=endpoint, config=config)
        without_credentials(made.meta.endpoint_url)
        return made

    with translated("dynamodb"):
        clients = Clients(reads=client(patience), writes=client(evolve(patience, attempts=1)))
    read_listings_quickly(clients.reads)
    return clients


@contextmanager
def translated(table: str) -> Iterator[None]:
    """Turns what boto3 raises into StoreError, where asking again cannot help, or OutcomeUnknown."""
    try:
        yield
    except ClientError as error:
        raise _meaning(table, error) from error
    except NoRegionError as error:
        raise StoreError(f"{table}: no region is set; add ?region=… to the URL, or set AWS_REGION") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(f"{table}: {error}; set AWS credentials in the environment") from error
    except ParamValidationError as error:
        raise StoreError(f"{table}: {error}") from error
    except BotoCoreError as error:
        raise OutcomeUnknown(f"{table}: {error}") from error
    except (AttributeError, LookupError, TypeError, UnicodeDecodeError, ResponseParserError) as odd:
        # An answer of another shape: a proxy's, or a service's bad moment.
        raise OutcomeUnknown(f"{table}: an answer cannot be read: {said(odd)}") from odd


def _meaning(table: str, error: ClientError) -> StoreError:
    code, message = code_of(error), error.response.get("Error", {}).get("Message", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in THROTTLED or status >= 500:  # noqa: PLR2004  the service's own failures begin there
        return OutcomeUnknown(f"{table}: {code}: {message}")
    advice = ADVICE[code].format(asked=error.operation_name) if code in ADVICE else message
    return StoreError(f"{table}: {code}: {advice}")


def code_of(error: ClientError) -> str:
    """The service's name for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_missing(fault: StoreError) -> bool:
    """Whether the service says that there is no such table."""
    return isinstance(fault.__cause__, ClientError) and code_of(fault.__cause__) == "ResourceNotFoundException"


def _throttled(error: BaseException) -> bool:
    return isinstance(error, ClientError) and code_of(error) in THROTTLED


def unless_throttled(call: Callable[..., T], arguments: Mapping[str, Any]) -> T:
    """Make this call, again after a pause where it was refused for want of throughput (rule 2)."""
    again = Retrying(
        retry=retry_if_exception(_throttled),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.05, max=1),
        reraise=True,
    )
    return again(call, **arguments)
