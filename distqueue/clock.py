"""Tell the time of leases, and of what waits."""

import time

_EPOCH_MINUS_MONOTONIC_S = time.time() - time.monotonic()


def epoch_s() -> float:
    """Return seconds since the epoch, by a monotonic clock: setting the machine's time ends no lease."""
    return time.monotonic() + _EPOCH_MINUS_MONOTONIC_S
