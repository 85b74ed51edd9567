import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.colocate.deployment import Role
from fusion.colocate.phases import SERVES, TRANSITIONS, Phase, PhaseError, PhaseMachine

ROLES = st.frozensets(st.sampled_from(list(Role)), min_size=1)
REQUESTS = st.lists(st.sampled_from([*Phase, *SERVES]), max_size=30)


def _allowed(source, target, roles):
    return any(
        step.source is source and step.target is target and step.hosts <= roles and not step.lacks & roles
        for step in TRANSITIONS
    )


@given(ROLES, REQUESTS)
def test_only_the_table_s_transitions_happen_and_only_what_a_phase_serves_is_served(roles, requests):
    machine = PhaseMachine(3, roles)
    for request in requests:
        before = machine.phase
        if request in SERVES:
            if before in SERVES[request]:
                machine.require(request)
            else:
                with pytest.raises(PhaseError, match=f"cannot {request} in phase {before.value}; allowed"):
                    machine.require(request)
            assert machine.phase is before
        elif _allowed(before, request, roles):
            machine.begin(request)
            assert machine.phase is Phase.BROKEN and not machine.reachable, "between two phases a card serves nothing"
            for kind in SERVES:
                with pytest.raises(PhaseError):
                    machine.require(kind)
            machine.arrive(request)
            assert machine.phase is request
        else:
            with pytest.raises(PhaseError, match=rf"rank 3 \(.*\) .* from {before.value} to {request.value}; allowed"):
                machine.begin(request)
            assert machine.phase is before


@given(ROLES, REQUESTS)
def test_a_card_reaches_no_phase_of_a_role_it_lacks(roles, requests):
    machine = PhaseMachine(0, roles)
    needs = {
        Phase.TRAIN: Role.ACTOR_TRAIN,
        Phase.INFER: Role.ACTOR_GENERATION,
        Phase.REFERENCE: Role.REFERENCE,
        Phase.REWARD: Role.REWARD_MODEL,
    }
    for request in requests:
        if request in machine.reachable:
            machine.begin(request)
            machine.arrive(request)
        assert needs.get(machine.phase, next(iter(roles))) in roles


def test_every_phase_leads_on():
    for roles in ({Role.ACTOR_TRAIN, Role.ACTOR_GENERATION}, {Role.ACTOR_GENERATION}, set(Role)):
        for phase in {step.target for step in TRANSITIONS if step.hosts <= roles and not step.lacks & roles}:
            machine = PhaseMachine(0, frozenset(roles))
            machine.phase = phase
            assert machine.reachable, (roles, phase)


def test_a_request_in_the_wrong_phase_names_both():
    machine = PhaseMachine(1, frozenset({Role.ACTOR_TRAIN, Role.ACTOR_GENERATION}))
    machine.begin(Phase.TRAIN)
    machine.arrive(Phase.TRAIN)
    machine.require("train")
    allowed = r"rank 1 \(actor_train, actor_generation\) cannot generate in phase train; allowed in: \['infer'\]"
    with pytest.raises(PhaseError, match=allowed):
        machine.require("generate")
