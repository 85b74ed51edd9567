"""Samples that are suspended, and go on elsewhere, are what they would have been."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from distqueue import LocalQueue
from fusion.inference import Output, Request
from fusion.rollout.packing import KEPT
from fusion.rollout.partial_samples import PartialSamples, check_kept


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
