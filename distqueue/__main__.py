"""`python -m distqueue`: inspect a queue (see `inspection.py`)."""

import sys

from distqueue.inspection import main

sys.exit(main())
