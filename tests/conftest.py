"""What every process that runs tests has for itself, so that several may run side by side."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Ray notes here which cluster was started last, and what asks for "auto" joins that one.
os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rl-", dir="/tmp")  # short: there are sockets below it
atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)
