"""A card before its first stage, without Ray."""

import gc
from dataclasses import replace

from distqueue import LocalQueue
from fusion.colocate import Deployment
from fusion.model import Parallel
from stalesync.cards.card import Card
from tests.helpers import run_ranks


def prepared_card(rank, device, spec):
    loaded, frozen = [[] for _ in range(10_000)], gc.get_freeze_count()
    card = Card(spec, LocalQueue(["train"]))
    card.take_rank(rank)
    card.prepare("", device)
    return gc.get_freeze_count() - frozen, len(loaded)


def test_a_prepared_card_looks_for_no_garbage_in_what_it_has_loaded(spec):
    one = replace(spec, deployment=Deployment.colocated(1), train=Parallel(1), infer=Parallel(1))
    ((frozen, loaded),) = run_ranks(prepared_card, 1, one)
    assert frozen > loaded
