"""Lists the parsers that are fuzzed, and the modules that need not be."""

from fuzz_commands import COMMANDS
from fuzz_sources import SOURCES
from fuzz_stores import STORES

TARGETS = (*STORES, *SOURCES, *COMMANDS)

_OWN = "it reads what this project wrote, in the same run"
_STAND_IN = "a stand-in on this machine, which answers this machine alone"

TRUSTED = {
    "leasehold_lab/demo/dev.py": _OWN,
    "leasehold_lab/demo/producer.py": _OWN,
    "leasehold_lab/standins/hubs/server.py": _STAND_IN,
    "leasehold_lab/standins/hubs/event_hubs.py": _STAND_IN,
    "leasehold_lab/standins/tables.py": _STAND_IN,
    "leasehold_lab/checker/sessions.py": _OWN,
    "leasehold_lab/simulator/question.py": _OWN,
    "adapters/lambda_handlers.py": "a change record is JSON that `adapters/sources/dynamodb_streams.py` wrote",
    "adapters/consumer/events.py": "the time is the logging library's",
    "adapters/spark/fetching.py": "a request of three fields has any bytes, and Arrow parses the rows",
    "adapters/spark/processes.py": "it unpickles what Spark has brought from the driver, as Spark itself does",
    "stores/aws_calls/calls.py": "the address is one that boto3 has asked, and whose answer it has taken",
}
"""Modules (below leasehold/ or lab/) that call a decoder and are not fuzzed, each with the reason."""
