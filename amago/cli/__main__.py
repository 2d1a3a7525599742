"""``python -m amago.cli``."""

import sys

from amago.cli import main

if __name__ == "__main__":
    sys.exit(main())
