"""`python -m distqueue`: the state of a queue (see `show.py`)."""

import sys

from distqueue.show import main

sys.exit(main())
