"""``python -m lab``."""

import sys

from .commands import main

sys.exit(main())
