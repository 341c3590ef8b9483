"""The files of tests/fleet, which chaos builds on."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fleet"))
