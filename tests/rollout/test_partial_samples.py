"""Samples that are suspended, and go on elsewhere, are what they would have been."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from distqueue import LocalQueue, PackedBatch
from fusion.inference import Output, Request
from fusion.rollout import EndedConversation
from fusion.rollout.packing import KEPT, SAMPLED, SAMPLED_TOKENS, pack_outputs
from fusion.rollout.partial_samples import OBSERVATION, TURN, TURN_TOKENS, PartialSamples, check_kept


def _output(tokens, version, before=(), earlier="", reason="abort", id="a/0"):
    logprobs = [-token / 10 for token in tokens]
    figures = id, "a", (1, 2), list(tokens), logprobs, [version] * len(tokens), reason
    return Output(*figures, before=tuple(before), earlier=earlier)


class Counting(LocalQueue):
    reads = 0

    def read(self, *args):
        self.reads += 1
        return super().read(*args)


@pytest.mark.parametrize("caches", [True, False])
def test_a_sample_that_is_suspended_twice_ends_with_all_its_parts(caches):
    queue = Counting(["train"])
    card = PartialSamples(queue, caches)
    (first,) = card.put([], [_output([5, 6], 0)])
    assert (first.generated, first.earlier, first.versions) == (2, "a/0~2", (0, 0))

    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=first.earlier)])
    assert again.response == (5, 6) and again.id == "a/0"
    (second,) = card.put([], [_output([7], 1, again.response, again.earlier, "chunk")])
    assert (second.generated, second.earlier, second.versions) == (3, "a/0~3", (0, 1))
    assert queue.stats()["distqueue/rows"] == 1, "the row that it replaces is dropped"

    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=second.earlier)])
    assert not card.put([_output([8], 2, again.response, again.earlier, "stop")])
    whole = queue.get("train", ["response", "behaviour_logprobs", "versions"], count=1)
    assert whole.ids == ("a/0",) and whole["response"][0].tolist() == [5, 6, 7, 8]
    assert whole["versions"][0].tolist() == [0, 0, 1, 2]
    assert torch.allclose(whole["behaviour_logprobs"][0], torch.tensor([-0.5, -0.6, -0.7, -0.8]))
    assert queue.stats()["distqueue/rows"] == 1
    assert queue.reads == (2 if caches else 4), "what was read as it came back need not be read again"


@pytest.mark.parametrize("caches", [True, False])
def test_the_routing_of_all_parts_is_put_with_the_whole_sample(caches):
    queue = LocalQueue(["train"])
    card = PartialSamples(queue, caches, routing=True)
    rows = torch.arange(5 * 3 * 2, dtype=torch.uint8).view(5, 3, 2)  # prompt of two tokens, response of four
    (first,) = card.put([], [replace(_output([5, 6], 0), routing=rows[:3])])
    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=first.earlier)])
    (second,) = card.put([], [replace(_output([7], 1, again.response, again.earlier), routing=rows[3:4])])
    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=second.earlier)])
    card.put([replace(_output([8], 2, again.response, again.earlier, "stop"), routing=rows[4:])])
    assert torch.equal(queue.get("train", ["routing"], count=1)["routing"][0], rows)


@pytest.mark.parametrize("caches", [True, False])
def test_the_kept_ids_of_all_parts_are_put_with_the_whole_sample(caches):
    def kept(output, *sets):
        ids = b"".join(np.array(one, np.int32).tobytes() for one in sets)
        return replace(output, kept_counts=[len(one) for one in sets], kept_ids=ids)

    queue = LocalQueue(["train"])
    card = PartialSamples(queue, caches, kept=True)
    (first,) = card.put([], [kept(_output([5, 6], 0), [5, 1], [6])])
    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=first.earlier)])
    (second,) = card.put([], [kept(_output([7], 1, again.response, again.earlier), [])])
    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=second.earlier)])
    card.put([kept(_output([8], 2, again.response, again.earlier, "stop"), [3, 8, 2])])
    whole = queue.get("train", [*KEPT], count=1)
    assert whole["kept_counts"][0].tolist() == [2, 1, 0, 3] and whole["kept_ids"][0].tolist() == [5, 1, 6, 3, 8, 2]
    assert whole["kept_counts"].buffer.dtype == whole["kept_ids"].buffer.dtype == torch.int32


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("suspended", [True, False])
def test_a_resume_with_rows_of_the_other_kind_of_sampling_is_refused_by_key(truncates, suspended):
    queue = LocalQueue(["train"])
    check_kept(queue.holding, truncates)
    output = _output([5, 6], 0)
    output = output if truncates else replace(output, kept_counts=[1, 1], kept_ids=np.array([5, 6], np.int32).tobytes())
    PartialSamples(queue).put(*([], [output]) if suspended else ([output],))
    check_kept(queue.holding, not truncates)
    with pytest.raises(
        ValueError, match=r"rollout.sampling.top_p: cannot resume: 1 samples .* expected rollout.sampling.top_p"
    ):
        check_kept(queue.holding, truncates)


def test_another_card_goes_on_with_what_this_one_has_read():
    queue = LocalQueue(["train"])
    here, there = PartialSamples(queue, caches=True), PartialSamples(queue, caches=True)
    (first,) = here.put([], [_output([5, 6], 0)])
    (again,) = here.restore([Request("a/0", (1, 2), group="a", earlier=first.earlier)])
    (second,) = here.put([], [_output([7], 1, again.response, again.earlier)])
    (again,) = there.restore([Request("a/0", (1, 2), group="a", earlier=second.earlier)])
    (third,) = there.put([], [_output([8], 1, again.response, again.earlier)])
    (again,) = here.restore([Request("a/0", (1, 2), group="a", earlier=third.earlier)])
    assert again.response == (5, 6, 7, 8)


def test_what_has_no_new_token_is_not_written_again():
    queue = LocalQueue(["train"])
    card = PartialSamples(queue)
    (fresh,) = card.put([], [_output([], 0)])
    assert (fresh.generated, fresh.earlier, fresh.versions) == (0, "", None)
    (first,) = card.put([], [_output([5, 6], 0)])
    (second,) = card.put([], [_output([], 1, (5, 6), first.earlier)])
    assert (second.generated, second.earlier, second.versions) == (2, first.earlier, None)
    assert queue.read([first.earlier], ["partial_response"])["partial_response"][0].tolist() == [5, 6]
    assert card.restore([Request("b", (1,))]) == [Request("b", (1,))]


def test_samples_that_end_and_others_that_do_not_are_put_together():
    queue = LocalQueue(["train"])
    card = PartialSamples(queue)
    before = card.put([], [_output([5, 6], 0), _output([7], 0, id="b/0")])
    again = card.restore([Request(one.id, (1, 2), earlier=one.earlier) for one in before])
    (left,) = card.put(
        [_output([9], 1, again[0].response, again[0].earlier, "stop")],
        [_output([4], 1, again[1].response, again[1].earlier, id="b/0")],
    )
    assert (left.id, left.generated, left.versions) == ("b/0", 2, (0, 1))
    assert queue.get("train", ["response"], count=1)["response"][0].tolist() == [5, 6, 9]
    assert queue.stats()["distqueue/rows"] == 2


@pytest.mark.parametrize("lost_when", ["resumed", "finished", "suspended again"])
def test_a_sample_whose_earlier_tokens_are_lost_ends_by_name_and_the_others_go_on(lost_when):
    queue = LocalQueue(["train"])
    card = PartialSamples(queue)
    suspended = card.put([], [_output([5, 6], 0), _output([9], 0, id="a/1")])
    requests = [Request(one.id, (1, 2), group="a", earlier=one.earlier) for one in suspended]
    if lost_when == "resumed":
        queue.lose([suspended[0].earlier], "damaged")
    resumed = card.restore(requests)
    assert [one.id for one in resumed] == (["a/1"] if lost_when == "resumed" else ["a/0", "a/1"])
    queue.lose([suspended[0].earlier], "damaged")
    outputs = [
        _output([7], 1, before, one.earlier, "stop" if lost_when == "finished" else "abort", id=one.id)
        for one, before in zip(suspended, [(5, 6), (9,)], strict=True)
        if one.id in {request.id for request in resumed}
    ]
    if lost_when == "finished":
        assert not card.put(outputs)
        assert queue.get("train", ["response"], 1)["response"][0].tolist() == [9, 7]
    else:
        assert [one.id for one in card.put([], outputs)] == ["a/1"]
    ended = [(one.id, one.group, one.reason) for one in queue.lost()]
    assert sorted(ended) == [("a/0", "a", "lost:earlier tokens"), ("a/0~2", "", "lost:damaged")]


def _observe(queue, row, observation):
    """As the controller does."""
    queue.put(PackedBatch.from_samples([row], {OBSERVATION: [torch.tensor(observation)]}))


def _turn(output, reason="turn"):
    return replace(output, finish_reason=reason, sampled=[True] * len(output.tokens))


def _text(tokens):
    return " ".join(map(str, tokens))


@pytest.mark.parametrize("ending", ["engine", "environment", "limit"])
@pytest.mark.parametrize("caches", [True, False])
def test_a_conversation_has_its_observations_in_between_and_is_known_by_what_was_sampled(caches, ending):
    queue = LocalQueue(["train"])
    card = PartialSamples(queue, caches, turns=True, detokenize=_text)
    (first,) = card.put([], [_turn(_output([5, 6], 3))])
    assert first.turn and (first.generated, first.earlier, first.versions) == (2, "a/0~2", (3, 3))
    assert queue.read(["a/0~2"], [TURN])[TURN][0] == "5 6"
    _observe(queue, first.earlier, [1, 2, 3])

    request = Request("a/0", (1, 2), group="a", earlier=first.earlier, turns=True, observation=3)
    (again,) = card.restore([request])
    assert (again.response, again.observation, again.turn_start) == ((5, 6, 1, 2, 3), 3, 5)
    (nothing,) = card.put([], [replace(_turn(_output([], 3, again.response, again.earlier), "abort"), observation=3)])
    assert (nothing.generated, nothing.earlier, nothing.versions, nothing.turn) == (5, "a/0~2", None, False)
    (again,) = card.restore([request])
    chunk = replace(_turn(_output([7], 4, again.response, again.earlier), "chunk"), observation=3)
    (second,) = card.put([], [chunk])
    assert not second.turn and (second.generated, second.earlier, second.versions) == (6, "a/0~6", (3, 4))
    assert not [*queue.holding(TURN)], "its turn goes on"

    (again,) = card.restore([Request("a/0", (1, 2), group="a", earlier=second.earlier, turns=True)])
    assert (again.response, again.observation, again.turn_start) == ((5, 6, 1, 2, 3, 7), 0, 5)
    output = _output([8], 5, again.response, again.earlier)
    if ending == "engine":
        assert not card.put([_turn(output, "length")])
    else:
        (third,) = card.put([], [_turn(output)])
        turn = queue.read([third.earlier], [TURN, TURN_TOKENS])
        assert turn[TURN][0] == "7 8" and turn[TURN_TOKENS][0].tolist() == [7, 8], "of the whole turn"
        other = PartialSamples(queue, caches, turns=True, detokenize=_text)
        other.complete([EndedConversation(third.earlier, "a", (1, 2), cut=ending == "limit")])
    columns = ["prompt", "response", "behaviour_logprobs", "versions", "cut", "text", SAMPLED, SAMPLED_TOKENS]
    whole = queue.get("train", columns, count=1)
    assert whole.ids == ("a/0",) and whole["prompt"][0].tolist() == [1, 2]
    assert whole["response"][0].tolist() == [5, 6, 1, 2, 3, 7, 8] and whole["text"][0] == "5 6 1 2 3 7 8"
    assert whole[SAMPLED][0].tolist() == [True, True, False, False, False, True, True]
    assert whole["versions"][0].tolist() == [3, 3, -1, -1, -1, 4, 5] and whole[SAMPLED_TOKENS].buffer.tolist() == [4]
    assert whole["behaviour_logprobs"][0].tolist() == pytest.approx([-0.5, -0.6, 0, 0, 0, -0.7, -0.8])
    assert whole["cut"].buffer.tolist() == [ending != "environment"]
    assert queue.stats()["distqueue/rows"] == 1, "the rows that it replaces are dropped"
    assert pack_outputs([_turn(_output([1, 2], 7))]).versions == ((7, 7),)
    packed = pack_outputs([replace(_turn(_output([9, 1, 9], 7)), versions=[7, -1, 8])])
    assert packed.versions == ((7, 8),), "an observation has no age"


def test_routing_and_kept_ids_of_a_conversation_pass_over_its_observations():
    queue = LocalQueue(["train"])
    card = PartialSamples(queue, routing=True, kept=True, turns=True)
    rows = torch.arange(7 * 3 * 2, dtype=torch.uint8).view(7, 3, 2)  # two of the prompt, five of the response

    def kept(output, routing):
        return replace(
            output, kept_counts=[1], kept_ids=np.array([output.tokens[0]], np.int32).tobytes(), routing=routing
        )

    (first,) = card.put([], [kept(_turn(_output([5], 0)), rows[:2])])
    _observe(queue, first.earlier, [1, 2])
    request = Request("a/0", (1, 2), group="a", earlier=first.earlier, turns=True, observation=2)
    (again,) = card.restore([request])
    turn = replace(_turn(_output([6], 0, again.response, again.earlier)), observation=2)
    (second,) = card.put([], [kept(turn, rows[2:5])])
    card.complete([EndedConversation(second.earlier, "a", (1, 2))])
    whole = queue.get("train", ["routing", *KEPT], count=1)
    assert torch.equal(whole["routing"][0], rows[:5])
    assert whole["kept_counts"][0].tolist() == [1, 0, 0, 1] and whole["kept_ids"][0].tolist() == [5, 6]


@pytest.mark.parametrize("lost_when", ["resumed", "completed"])
def test_a_conversation_whose_row_is_lost_ends_by_name(lost_when):
    queue = LocalQueue(["train"])
    card = PartialSamples(queue, turns=True)
    (first,) = card.put([], [_turn(_output([5], 0))])
    queue.lose([first.earlier], "damaged")
    if lost_when == "resumed":
        request = Request("a/0", (1, 2), group="a", earlier=first.earlier, turns=True, observation=2)
        assert not card.restore([request])
    else:
        card.complete([EndedConversation(first.earlier, "a", (1, 2))])
    ended = [(one.id, one.group, one.reason) for one in queue.lost()]
    assert sorted(ended) == [("a/0", "a", "lost:earlier tokens"), ("a/0~1", "", "lost:damaged")]


def test_a_branch_that_ends_is_trained_with_its_conversation_and_no_reward_is_asked_for_it():
    queue = LocalQueue(["reward", "train"])
    card = PartialSamples(queue, turns=True, detokenize=_text)
    asked = ["response", "text", "cut", SAMPLED_TOKENS]
    (first,) = card.put([], [_turn(_output([5, 6], 3))])
    card.complete([EndedConversation(first.earlier, "a", (1, 2), continues=True)])
    row = queue.read(["a/0"], ["prompt", "response", "behaviour_logprobs", "versions", SAMPLED])
    assert row["response"][0].tolist() == [5, 6] and row.versions == ((3, 3),) and row.groups == ("a",)
    (second,) = card.put([], [_turn(_output([7], 4, id="a/0.1"))])
    assert second.id == "a/0.1" and second.earlier == "a/0.1~1"
    card.complete([EndedConversation(second.earlier, "a", (1, 2, 5, 9))])
    whole = queue.get("reward", asked, count=1)
    assert whole.ids == ("a/0.1",) and whole["text"][0] == "7"
    assert queue.stats()["distqueue/rows"] == 2, "the rows that they replace are dropped"
