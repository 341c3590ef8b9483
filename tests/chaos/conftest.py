"""Makes the modules of lab/chaos importable, and those of tests/fleet and tests/multilang, which they use."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.extend(map(str, (TESTS.parent / "lab" / "chaos", TESTS / "fleet", TESTS / "multilang")))
