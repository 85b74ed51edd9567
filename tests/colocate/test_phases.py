import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.colocate.phases import SERVES, TRANSITIONS, Phase, PhaseError, PhaseMachine


@given(st.lists(st.sampled_from(list(Phase)), max_size=20))
def test_only_the_table_s_transitions_happen(wishes):
    machine = PhaseMachine(rank=3)
    for wish in wishes:
        before = machine.phase
        if wish in TRANSITIONS[before]:
            machine.begin(wish)
            assert machine.phase is Phase.BROKEN, "between two phases a card serves nothing"
            for request in SERVES:
                with pytest.raises(PhaseError):
                    machine.require(request)
            machine.arrive(wish)
            assert machine.phase is wish
        else:
            with pytest.raises(PhaseError, match=f"rank 3 is in phase {before.value} .* {wish.value}"):
                machine.begin(wish)
            assert machine.phase is before


def test_a_request_in_the_wrong_phase_names_both():
    machine = PhaseMachine(rank=1)
    machine.begin(Phase.TRAIN)
    machine.arrive(Phase.TRAIN)
    machine.require("train")
    with pytest.raises(
        PhaseError, match=r"rank 1 is in phase train and was asked to generate, which needs \['infer'\]"
    ):
        machine.require("generate")
