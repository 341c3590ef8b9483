"""Makes the modules of lab/mutation importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "lab" / "mutation"))
