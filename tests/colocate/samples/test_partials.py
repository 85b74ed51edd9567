"""Samples that are suspended, and go on elsewhere, are what they would have been."""

import torch

from distqueue import LocalQueue
from fusion.colocate.samples.partials import forget, merge, park, restore
from fusion.inference import Output, Request


def _output(tokens, version, before=(), earlier="", reason="abort"):
    logprobs = [-token / 10 for token in tokens]
    figures = "a/0", "a", (1, 2), list(tokens), logprobs, [version] * len(tokens), reason
    return Output(*figures, before=tuple(before), earlier=earlier)


def test_a_sample_that_is_suspended_twice_ends_with_all_its_parts():
    queue = LocalQueue(["train"])
    request = Request("a/0", (1, 2), group="a")
    (first,) = park([_output([5, 6], 0)], queue)
    assert (first.generated, first.earlier, first.versions) == (2, "a/0~2", (0, 0))

    (again,) = restore([Request("a/0", (1, 2), group="a", earlier=first.earlier)], queue)
    assert again.response == (5, 6) and again.id == request.id
    (second,) = park([_output([7], 1, again.response, again.earlier)], queue)
    assert (second.generated, second.earlier, second.versions) == (3, "a/0~3", (0, 1))
    assert queue.stats()["distqueue/rows"] == 1, "the row that it replaces is dropped"

    (whole,) = merge([_output([8], 2, (5, 6, 7), second.earlier, "stop")], queue)
    assert whole.tokens == [5, 6, 7, 8] and whole.versions == [0, 0, 1, 2] and whole.finish_reason == "stop"
    assert torch.allclose(torch.tensor(whole.logprobs), torch.tensor([-0.5, -0.6, -0.7, -0.8]))
    forget([_output([8], 2, (5, 6, 7), second.earlier, "stop")], queue)
    assert queue.stats()["distqueue/rows"] == 0


def test_what_has_no_new_token_is_not_written_again():
    queue = LocalQueue(["train"])
    (fresh,) = park([_output([], 0)], queue)
    assert (fresh.generated, fresh.earlier, fresh.versions) == (0, "", None)
    (first,) = park([_output([5, 6], 0)], queue)
    (second,) = park([_output([], 1, (5, 6), first.earlier)], queue)
    assert (second.generated, second.earlier, second.versions) == (2, first.earlier, None)
    assert queue.read([first.earlier], ["partial_response"])["partial_response"][0].tolist() == [5, 6]
    assert restore([Request("b", (1,))], queue) == [Request("b", (1,))]
