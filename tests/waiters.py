"""How boto3's waiters wait for stand-ins, which make a stream in milliseconds: they ask again at once."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types_boto3_kinesis.type_defs import WaiterConfigTypeDef

# The least that a waiter waits otherwise is a second. How often it may ask is left to the time limit of the test.
AT_ONCE: "WaiterConfigTypeDef" = {"Delay": 0, "MaxAttempts": 100_000}
