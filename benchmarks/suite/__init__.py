"""Ten learning tasks for comparing settings and methods: ``python -m benchmarks.suite --help``."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:  # as for a script that is run: examples, and one task here, import `support`
    sys.path.insert(0, str(EXAMPLES))
