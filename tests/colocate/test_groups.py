"""Which process groups cards create: one for the same members, with gloo only where the host communicates."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion.colocate.groups import OTHER_FILES, cost_of, plan_groups, raise_file_limit
from fusion.colocate.meshes import Meshes
from fusion.model import parallel
from tests.colocate.cards import make_spec
from tests.helpers import processes, run_ranks, tiny_checkpoint
from tests.machine import patience


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def test_cards_that_meet_in_several_roles_have_one_group_and_gloo_joins_where_the_host_communicates(folder):
    groups = plan_groups(make_spec(folder, 8, {"tp": 2, "ep": 2, "etp": 2}, {"ep": 8}))
    assert [members for members in groups if len(members) == 8] == [tuple(range(8))], (
        "train, actor, engine, both worlds"
    )
    assert groups[tuple(range(8))], "the host agrees there"
    assert groups[0, 1], "TP, and expert TP has the same members"
    assert not groups[0, 2], "EP: tokens only"
    assert not groups[0, 4], "expert DP: gradients only"
    assert groups[0, 2, 4, 6], "DP: the host divides micro-batches"
    assert plan_groups(make_spec(folder, 8, {"tp": 2, "ep": 2, "pp": 2}, {"ep": 8}))[0, 1], "TP; EP has its members"


def test_hosts_of_an_expert_axis_communicate_where_routing_is_replayed(folder):
    spec = make_spec(folder, 8, {"ep": 2, "etp": 2}, {"ep": 8})
    assert not any(plan_groups(spec)[members] for members in ((0, 1), (0, 2), (0, 4)))
    groups = plan_groups(replace(spec, algorithm=replace(spec.algorithm, replay="rollout")))
    assert groups[0, 1] and groups[0, 2], "they tell each other how many rows they exchange"
    assert not groups[0, 4], "expert DP: gradients only"
    assert list(groups) == list(plan_groups(spec)), "in one order on every card"


def test_cards_that_share_samples_by_context_parallelism_read_them_together_and_exchange_rows_on_the_card(folder):
    groups = plan_groups(make_spec(folder, 8, {"tp": 2, "cp": 2}, {"ep": 8}))
    assert groups[0, 1, 2, 3] and groups[4, 5, 6, 7], "the replicas"
    assert not groups[0, 2], "context parallel: rows and heads"
    assert groups[0, 2, 4, 6], "DP"


def test_a_card_of_768_has_two_full_meshes_of_sockets(folder):
    """One for switches, phases and training, and one for saving; five more come only from groups of its own axes. The
    engine's experts have a communicator of their own beside its group."""
    spec = make_spec(folder, 768, {"tp": 8, "ep": 64}, {"tp": 2, "ep": 64})
    cost = cost_of(spec)
    train = {"tp": 7, "dp": 95, "world, stage, actor": 767, "saved": 767}
    infer = {"tp": 1, "dp of an engine": 31, "engine": 63}
    assert cost.sockets == sum([*train.values(), *infer.values()])
    assert cost.communicators == len({"tp", "dp", "world", "edp"} | {"tp'", "dp'", "ep = engine", "dispatch"})


def meet(rank, device, spec):
    """Count this process's connected sockets that its groups add, and use every group that the host uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", "0")  # as in a run: ranks connect when a group is made
        before = sockets()
        meshes = Meshes.create(spec, rank, device.process_group_backend)
        added = sockets() - before
    assert meshes.train and meshes.engine and meshes.trainers is meshes.actor is meshes.train.world_group
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=meshes.train.world_group)
    on_card = torch.ones(1, device=device.torch_device)
    torch.distributed.all_reduce(on_card, group=meshes.train.ep_group)
    with pytest.raises(RuntimeError):
        torch.distributed.all_reduce(torch.ones(1), group=meshes.train.ep_group)
    return added, total.item(), on_card.item()


def sockets():
    links = (path for path in Path(f"/proc/{os.getpid()}/fd").iterdir() if path.exists() or path.is_symlink())
    return sum(os.readlink(path).startswith("socket:") for path in links if path.is_symlink())


def test_groups_open_the_sockets_that_were_planned_and_those_of_the_card_serve_the_card_alone(folder):
    spec = make_spec(folder, 4, {"ep": 2}, {"ep": 4})
    for added, total, on_card in run_ranks(meet, 4, spec):
        assert (total, on_card) == (4, 2)
        assert added >= cost_of(spec).sockets


def dispatch(rank, device, spec):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "MIN_DISPATCH_RANKS", 2)
        created = Meshes.create(spec, rank, device.process_group_backend)
        restarted = Meshes.create_restarted(spec, rank, 1, device.process_group_backend)
    assert created.train.dispatch_group is None
    totals = []
    for engine in (created.engine, restarted.engine):
        group, on_card = engine.dispatch_group, torch.ones(1, device=device.torch_device)
        assert group not in (engine.ep_group, engine.world_group)
        torch.distributed.all_reduce(on_card, group=group)
        with pytest.raises(RuntimeError):
            torch.distributed.all_reduce(torch.ones(1), group=group)
        totals.append(on_card.item())
    return totals


def test_engines_that_dispatch_rows_have_a_group_of_the_card_that_nothing_else_uses(folder):
    assert run_ranks(dispatch, 4, make_spec(folder, 4, {"ep": 2}, {"ep": 4})) == [[4, 4]] * 4


def limited(pipe, spec, soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        raise_file_limit(spec)
    except ValueError as error:
        pipe.send(str(error))
    pipe.send(resource.getrlimit(resource.RLIMIT_NOFILE))


def test_a_card_may_open_what_the_system_allows_and_refuses_a_plan_beyond_it(folder):
    spec = make_spec(folder, 768, {"tp": 8, "ep": 64}, {"tp": 2, "ep": 64})
    needed = cost_of(spec).sockets + OTHER_FILES
    for hard, refused in ((needed, False), (needed - 1, True)):
        pipe, there = processes().Pipe()
        process = processes().Process(target=limited, args=(there, spec, 512, hard))
        process.start()
        if refused:
            assert f"cluster.npus=768: a card opens up to {needed} files" in pipe.recv()
        assert pipe.recv() == (512 if refused else hard, hard)
        process.join(patience(20))
