"""Run a stage of a frozen role: the card leaves its phase, computes with the role's weights in HBM, and returns."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from fusion.colocate.phases import Phase, PhaseMachine
from fusion.model import Mesh
from fusion.npu import Device
from fusion.npu.all_or_none import all_or_none


@contextmanager
def in_role_phase(
    phases: PhaseMachine, phase: Phase, *, mesh: Mesh, weights: AbstractContextManager[None], device: Device
) -> Iterator[None]:
    """Put the card into ``phase`` with ``weights`` entered for the duration of the block, then back into its phase; all
    cards of ``mesh`` together. Raise AbortedOnAllRanks on all cards if one fails. If the phase of one does not allow
    the transition, all keep their phase; after a later failure all are BROKEN."""
    on_all = partial(all_or_none, group=mesh.world_group, rank=phases.rank, device=device)
    home = phases.phase
    on_all(lambda: phases.check(phase), stage="phase")
    phases.begin(phase)
    try:
        with ExitStack() as inside:
            on_all(lambda: inside.enter_context(weights), stage=f"to {phase.value}")
            phases.arrive(phase)
            yield
            phases.begin(home)
            on_all(inside.close, stage=f"back to {home.value}")
        phases.arrive(home)
    except BaseException:
        phases.arrive(Phase.BROKEN)
        raise
