"""Workers behind Ray: calls by stage, control while a stage runs, failures that name rank and stage."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from distqueue import DistQueue
from fusion.colocate import InferenceShare, Worker
from fusion.inference import Request, RolloutConfig, SamplingParams
from fusion.npu import DeviceConfig
from fusion.npu.config import claim
from stalesync.cards.actors import on_cards
from stalesync.cards.cards import Cards
from stalesync.cards.stage_calls import describe_hanging, stage_call
from stalesync.policy.placing import check_cards, order_by_place
from stalesync.process.failures import CardFailed, RayEnded
from tests.machine import patience, wait_for
from tests.warm import use_ray


@pytest.fixture(scope="module")
def queue():
    use_ray()
    created = DistQueue.create(["train"])
    yield created
    created.close()


@pytest.fixture(scope="module")
def cards(spec, queue):
    with Cards(spec, queue, timeout_s=patience(120)) as running:
        assert all("npu:0" in found for found in running.prepare())
        yield running


def test_a_card_answers_while_it_generates(cards):
    cards.on().call(Worker.switch, "infer", 0)
    endless = Request("a", (3, 4, 5), SamplingParams(max_tokens=8000, stop_token_ids=()))
    late = Request("b", (3, 4, 5), SamplingParams(max_tokens=4, stop_token_ids=()))
    reports = []
    calls = {0: stage_call(Worker.answer, [endless]), 1: stage_call(Worker.answer, [])}
    stage = threading.Thread(target=lambda: reports.extend(cards.call_each(calls)))
    stage.start()
    wait_for(lambda: cards.on([0]).ask(Worker.status)[0]["running"] > 0, 60)
    assert cards.on([0]).ask(Worker.status)[0]["stage"] == "answer"
    cards.on([0]).ask(Worker.submit, [late])
    with pytest.raises(CardFailed, match="^rank 0 failed in stage 'submit': ValueError: request 'c': the prompt is em"):
        cards.on([0]).ask(Worker.submit, [Request("c", (), SamplingParams(max_tokens=4))])
    time.sleep(0.3)
    cards.on([0]).ask(Worker.abort, ["a"])
    stage.join(timeout=patience(60))
    answers = {answer.id: answer for report in reports for answer in report.answers}
    assert answers["a"].finish_reason == "abort" and 0 < answers["a"].response_tokens < 8000
    assert answers["b"].finish_reason == "length" and answers["b"].response_tokens == 4
    cards.on().call(Worker.switch, "train", 0)


def test_what_a_card_raises_in_a_control_call_names_its_rank_and_the_call(cards):
    with pytest.raises(CardFailed, match="^rank 1 failed in stage 'forget': AssertionError: .*rank 0"):
        cards.on([1]).ask(Worker.forget, ["a"])


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], ""),
        ([3], "; rank 3 did not answer a status call: it hangs"),
        ([4, 1], "; rank 1 and rank 4 did not answer a status call: they hang"),
    ],
)
def test_ranks_that_hang_are_named(ranks, words):
    assert describe_hanging(ranks) == words


def test_what_a_card_raises_names_its_rank_and_stage(cards):
    with pytest.raises(CardFailed, match="rank 0 failed in stage 'generate': .*in phase train"):
        cards.on().call(Worker.generate, [])


def test_the_rank_that_fails_by_itself_is_named_not_those_it_left_waiting(spec, queue, cards):
    with Cards(spec, queue, timeout_s=patience(60)) as others:
        address = others.on([0]).call(Worker.rendezvous)[0]
        with pytest.raises(CardFailed, match="rank 1 failed in stage 'prepare'.*nowhere"):
            others.call_each({0: stage_call(Worker.prepare, address), 1: stage_call(Worker.prepare, "nowhere://")})


def test_a_switch_that_fails_on_one_card_is_broken_off_on_all_and_named(cards):
    share = InferenceShare.of(RolloutConfig(), 1)
    with pytest.raises(
        CardFailed,
        match="rank 1 failed in stage 'switch': .*aborted on all cards: rank 1 failed in settings: ValueError: r",
    ):
        shares = {0: share, 1: replace(share, max_seqs=0)}
        cards.call_each({rank: stage_call(Worker.switch, "infer", 1, shares[rank]) for rank in shares})
    for rank in range(2):
        assert cards.on([rank]).ask(Worker.status)[0]["phase"] == "broken", "no half-switched model serves"
    with pytest.raises(CardFailed, match="cannot generate in phase broken"):
        cards.on().call(Worker.generate, [])


def test_of_two_that_are_late_the_one_that_hangs_is_named(spec, queue, cards, monkeypatch):
    monkeypatch.setattr("stalesync.cards.card_failures.STATUS_TIMEOUT_S", patience(1))
    with Cards(spec, queue, timeout_s=patience(60)) as others:
        others.prepare()
        others.timeout_s = limit_s = round(patience(1))
        hangs = others.on([1]).ask(Worker.status)[0]["pid"]
        os.kill(hangs, signal.SIGSTOP)
        with pytest.raises(
            CardFailed, match=rf"'switch': ranks \[0, 1\] were not done after {limit_s} s .*; rank 1 did not answ"
        ):
            others.on().call(Worker.switch, "infer", 0)
        # The one that rank 0 waits for need not run the same stage.
        with pytest.raises(
            CardFailed, match=rf"'switch': ranks \[0\] were not done after {limit_s} s .*; rank 1 did not"
        ):
            others.on([0]).call(Worker.switch, "infer", 0)
        with pytest.raises(CardFailed, match=f"rank 1 did not answer 'pause' in {limit_s} s: it hangs"):
            others.on([1]).ask(Worker.pause)


def test_a_card_that_answers_late_is_waited_for_and_reported(spec, queue, cards, monkeypatch, caplog):
    """Its machine was suspended, or too busy."""
    monkeypatch.setattr("stalesync.cards.cards.WARN_EVERY_S", 0.5)
    with Cards(spec, queue, timeout_s=patience(60)) as others:
        pid = others.on([1]).ask(Worker.status)[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(2.5, os.kill, (pid, signal.SIGCONT)).start()
        assert [answer["rank"] for answer in others.on().ask(Worker.status)] == [0, 1]
        assert [message for message in caplog.messages if "status: ranks [1] have not answered for" in message]


def test_a_card_that_died_ends_a_control_call_at_once_although_another_is_late(spec, queue, cards):
    with Cards(spec, queue, timeout_s=patience(60)) as others:
        pids = [answer["pid"] for answer in others.on().ask(Worker.status)]
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(CardFailed, match="^rank 1 died in stage 'status'") as failed:
            others.on().ask(Worker.status)
        assert time.monotonic() - began < patience(20) and failed.value.failure.rank == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_of_a_card_that_died_the_stage_that_it_ran_is_named_not_a_control_call(spec, queue, cards, elsewhere):
    with Cards(spec, queue, timeout_s=patience(60)) as others:
        address = others.on([0]).call(Worker.rendezvous)[0]

        def begin():
            others.on([0]).begin(Worker.prepare, address)  # waits for rank 1
            others.on([0]).begin(Worker.switch, "infer", 0)

        if elsewhere:
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        else:
            begin()
        os.kill(others.on([0]).ask(Worker.status)[0]["pid"], signal.SIGKILL)
        with pytest.raises(CardFailed, match="^rank 0 died in stage 'prepare'"):
            others.on([0]).ask(Worker.pause)


@pytest.mark.parametrize("how", ["call", "ask"])
def test_a_card_that_died_is_not_named_if_a_health_check_fails_by_then(spec, queue, cards, how):
    polled = []

    def health_check():
        polled.append(None)
        if len(polled) > 3:  # a call polls before it waits, and a raylet kills its workers before it ends
            raise RayEnded("raylet")

    with Cards(spec, queue, timeout_s=patience(60)) as others:
        os.kill(others.on([0]).ask(Worker.status)[0]["pid"], signal.SIGKILL)
        others.health_checks.append(health_check)
        with pytest.raises(RayEnded, match="raylet has ended"):
            getattr(others.on([0]), how)(Worker.status)


@pytest.mark.parametrize(
    ("kind", "cluster", "found"),
    [
        ("auto", {"CPU": 8.0}, "emulated"),
        ("auto", {"GPU": 8.0}, "cuda"),
        ("auto", {"GPU": 8.0, "NPU": 16.0}, "npu"),
        ("emulated", {"NPU": 16.0}, "emulated"),
    ],
)
def test_auto_takes_what_the_cluster_counts(kind, cluster, found):
    assert claim(kind, cluster)[0] == found


def test_ranks_go_node_by_node_and_card_by_card():
    places = [("10.0.0.10", ["1"]), ("10.0.0.9", ["10"]), ("10.0.0.10", ["0"]), ("10.0.0.9", ["9"])]
    assert order_by_place(places) == [3, 1, 2, 0]
    assert order_by_place([("here", [])] * 3) == [0, 1, 2]


def test_cards_that_are_not_there_are_refused_instead_of_awaited():
    with pytest.raises(ValueError, match="device.kind=cuda with cluster.npus=4: Ray counts 2 such cards"):
        check_cards("cuda", 4, {"CPU": 8.0, "GPU": 2.0})
    check_cards("npu", 16, {"NPU": 16.0})
    check_cards("emulated", 768, {"CPU": 2.0})


@pytest.mark.parametrize(
    ("kind", "operators", "stated", "size"),
    [
        ("emulated", "auto", 16, 16),
        ("emulated", "ascend", 48, 48),
        ("npu", "auto", 16, 128),
        ("npu", "plain", 16, 16),
        ("cuda", "auto", 16, 256),
        ("cuda", "auto", 512, 512),
        ("cuda", "auto", 272, 512),
    ],
)
def test_kv_blocks_are_those_that_the_cards_attention_reads(spec, kind, operators, stated, size):
    engine = replace(spec.rollout.engine, block_size=stated)
    wanted = replace(spec, device=DeviceConfig(operators=operators), rollout=replace(spec.rollout, engine=engine))
    found = on_cards(wanted, kind)
    assert (found.device.kind, found.rollout.engine.block_size) == (kind, size)
