"""``python -m amago.cli``."""

import sys

from amago.cli import main

sys.exit(main())
