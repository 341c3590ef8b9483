"""Make the modules of tests/fleet and tests/multilang importable, because chaos builds on them."""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("fleet", "multilang"))
