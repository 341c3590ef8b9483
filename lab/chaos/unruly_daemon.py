"""Runs `leasehold multilang` on the stream and the store of a run, whose URLs no .properties file can contain.

    python lab/chaos/unruly_daemon.py WRITES SOURCE STORE CYCLE_SECONDS FILE …

WRITES gets a line for each write of its leases.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from raising_log import RaisingLogHandler
from written import record_writes

from leasehold.adapters import consuming
from leasehold.adapters.cli.steer import multilang
from leasehold.adapters.consuming import Consumption
from leasehold.adapters.options import Options

if __name__ == "__main__":
    writes, source, store, cycle_seconds = (sys.argv.pop(1) for _ in range(4))

    def check_options_of_run(_source: str, _store: str, handling: Any, options: Options, label: Any) -> Consumption:  # noqa: ANN401  as in the function that it replaces
        """Return the consumption with the run's stream, store and cycle time, and with the option `if_recreated`."""
        options = options | {"set": {"cycle_seconds": float(cycle_seconds)}, "if_recreated": "TRIM_HORIZON"}
        return consuming.check_consumption_options(source, store, handling, options, label)

    RaisingLogHandler(Path(os.environ["CHAOS_ORDERS"])).install()
    with record_writes(Path(writes)), patch.object(multilang, "check_consumption_options", check_options_of_run):
        multilang.app()
