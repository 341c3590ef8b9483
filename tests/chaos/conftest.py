"""The files of tests/fleet and tests/multilang, which chaos builds on."""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("fleet", "multilang"))
