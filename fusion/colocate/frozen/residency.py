"""Choose whose weights are in HBM while reference and reward model compute on cards that train. Pure.

    beside    the role's weights are loaded in addition to the actor's, and released again   (all deployments but full)
    one       the role's weights replace the actor's, and then the reverse: one model in HBM at a time
    all       the role's weights always stay in HBM: nothing is copied, but the KV cache is smaller

Invariants (property-tested in tests/colocate/frozen/test_residency.py): `exchange_order` names every unit once, units
of one side in order; after every step of it the bytes in HBM are at most those of the larger side."""

from collections.abc import Iterator, Sequence
from typing import Literal

Residency = Literal["beside", "one", "all"]
RESIDENT_FRACTION = 0.5
"""Share of the free memory that resident roles may take: the rest is for activations and the KV cache."""


def choose_residency(deployment: str, resident: str, *, free_bytes: int, role_bytes: int) -> Residency:
    """Choose where the weights of roles on cards that train are kept. ``resident``: `fusion.resident`, used in the
    deployment *full* only: one, all or auto; ``free_bytes``: free device memory once all of training is in HBM;
    ``role_bytes``: weights of all scoring roles on the card."""
    if deployment != "full":
        return "beside"
    if resident == "auto":
        return "all" if role_bytes <= RESIDENT_FRACTION * free_bytes else "one"
    return "one" if resident == "one" else "all"


def exchange_order(leaving: Sequence[int], coming: Sequence[int]) -> Iterator[tuple[Literal["out", "in"], int]]:
    """Order the offloading and loading of units (bytes each) so that they never need more than the larger side: yield
    ("out", index in ``leaving``) or ("in", index in ``coming``)."""
    freed = taken = done = 0
    for index, nbytes in enumerate(coming):
        while done < len(leaving) and taken + nbytes > freed:
            yield "out", done
            freed += leaving[done]
            done += 1
        yield "in", index
        taken += nbytes
    for index in range(done, len(leaving)):
        yield "out", index
