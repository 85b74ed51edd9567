import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fusion.inference import SamplingParams
from fusion.inference.noise import request_key, uniforms
from fusion.inference.sampler import next_below, sample
from fusion.model.head import MAX_KEPT_IDS
from fusion.npu import open_device
from tests.atomic_additions import AtomicAdditions
from tests.host_reads import HostReads

VOCABULARY = 24
ROWS = 20000


def logits_row(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def draws(count: int = ROWS) -> np.ndarray:
    return uniforms(3, np.full(count, request_key("r"), np.uint64), np.arange(count))


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution transformers would sample from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits[None].double())[0].softmax(-1)


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_frequencies_are_those_of_transformers_filters(params):
    logits = logits_row()
    want = filtered(logits, params).numpy()
    tokens, logprobs, kept = sample(logits.expand(ROWS, -1), [params] * ROWS, draws())
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert (counts[want == 0] == 0).all()
    expected = want * ROWS
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < likely.sum() + 5 * (2 * likely.sum()) ** 0.5
    assert abs(counts / ROWS - want).sum() / 2 < 0.02
    assert torch.allclose(torch.tensor(logprobs).double(), torch.from_numpy(want).log()[tokens], atol=2e-6)
    assert (kept is not None) == params.truncates
    for ids in kept or []:
        assert sorted(np.frombuffer(ids, np.int32).tolist()) == np.flatnonzero(want).tolist()


def test_every_row_has_its_own_parameters_and_greedy_draws_no_noise():
    params = [*FILTERS, SamplingParams(temperature=0)] * 50
    logits = torch.stack([logits_row(i) for i in range(len(params))])
    noise = draws(len(params))
    tokens, logprobs, kept = sample(logits, params, noise)
    for i, one in enumerate(params):
        token, logprob, alone = sample(logits[i : i + 1], [one], noise[i : i + 1])
        assert (token, logprob, alone or [b""]) == ([tokens[i]], [logprobs[i]], [kept[i]])
        if one.temperature == 0:
            assert tokens[i] == int(logits[i].argmax())
            assert logprobs[i] == float(logits[i].log_softmax(-1)[tokens[i]])


@pytest.mark.parametrize("params", [*([one] * 8 for one in FILTERS), FILTERS])
def test_the_host_waits_for_a_card_once(params):
    logits = torch.stack([logits_row(i) for i in range(8)]).to(open_device("emulated").torch_device)
    with HostReads() as reads:
        found = sample(logits, params, draws(8))
    assert reads.found == ["_to_copy"] and not reads.sent
    assert found.tokens == sample(logits.cpu(), params, draws(8)).tokens


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_card_adds_in_an_order_that_does_not_differ_between_runs(params, rows):
    logits = torch.stack([logits_row(i) for i in range(rows)]).to(open_device("emulated").torch_device)
    with AtomicAdditions() as added:
        sample(logits, [params] * rows, draws(rows))
    assert not added.found


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)], ids=str)
def test_noise_at_either_end_gives_a_token_that_can_be_sampled(params):
    logits = logits_row()
    logits[[0, 1, -2, -1]] = -torch.inf
    noise = np.array([0.0, 2.0**-53, 1 - 2.0**-53, 1 - 2.0**-30])
    tokens, *_ = sample(logits.expand(4, -1), [params] * 4, noise)
    assert (filtered(logits, params)[tokens] > 0).all()


def test_more_noise_is_a_later_token():
    tokens, *_ = sample(
        logits_row().expand(1000, -1), [SamplingParams()] * 1000, np.linspace(0, 1, 1000, endpoint=False)
    )
    assert tokens == sorted(tokens)
    assert len(set(tokens)) > 10


def test_a_filtered_distribution_has_at_most_1024_ids_and_what_is_recorded_is_what_was_sampled_from():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(top_p=0.999), SamplingParams(), SamplingParams(top_k=5000)]
    tokens, logprobs, kept = sample(logits.repeat(400, 1), params * 400, draws(1200))
    most_likely = logits[0].sort(descending=True).indices[:MAX_KEPT_IDS].tolist()
    renormalised = logits[0, most_likely].double().log_softmax(-1)
    for i in range(0, 1200, 3):
        assert np.frombuffer(kept[i], np.int32).tolist() == most_likely
        assert logprobs[i] == pytest.approx(float(renormalised[most_likely.index(tokens[i])]), abs=1e-5)
        assert kept[i + 1] == kept[i + 2] == b"", "all of the vocabulary are no filter"


def test_an_id_of_probability_0_is_not_among_the_kept_ones():
    logits = torch.zeros(1, 50)
    logits[0, 7:] = torch.finfo(torch.float32).min
    for params in (SamplingParams(top_k=20), SamplingParams(top_p=1 - 1e-9), SamplingParams(min_p=1e-30)):
        _, (logprob,), (ids,) = sample(logits, [params], draws(1))
        assert sorted(np.frombuffer(ids, np.int32).tolist()) == list(range(7))
        assert logprob == pytest.approx(-np.log(7), abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "integer", "mantissa"), [(torch.float32, torch.int32, 23), (torch.float64, torch.int64, 52)]
)
def test_the_number_below_has_the_bits_of_nextafter_at_every_exponent(dtype, integer, mantissa):
    """Zero, subnormal numbers, all powers of two and their neighbours, the largest number and infinity."""
    exponents = torch.arange(1 << dtype.itemsize * 8 - 1 - mantissa, dtype=integer)[:, None] << mantissa
    bits = (exponents + torch.arange(-2, 3, dtype=integer)).flatten()
    bits = bits[(bits >= 0) & (bits <= exponents.max())]
    values = bits.view(dtype)
    assert len(values) > 5 * 250 and values.max().isinf() and not values.isnan().any()
    expected = torch.nextafter(values, torch.zeros_like(values))
    assert torch.equal(next_below(values).view(integer), expected.view(integer))
    strided = values.expand(2, -1).T
    assert torch.equal(next_below(strided), expected.expand(2, -1).T)
    assert next_below(torch.tensor(-torch.nan, dtype=dtype)).isnan() and next_below(torch.tensor(torch.nan)).isnan()
