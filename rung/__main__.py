"""`python -m rung` is `rung`."""

import sys

from rung.cli import main

sys.exit(main())
