"""Seconds and activations of training where siblings share the rows of their prompt, as a run's micro-batches do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.pace import Pace, TrainerCost
from fusion.costmodel.presets import load_shape
from fusion.costmodel.roofline import attention_pairs
from fusion.costmodel.setup import Setup, TrainingLimits, Workload
from fusion.costmodel.step_time import reference_s, train_s
from fusion.model import Parallel
from fusion.model.prefixes import READS_OF_ROW, ROWS_OF_LINK, SHARE_PREFIXES, links, runs
from fusion.resources import SHAPES
from stalesync.job.workload import describe_sharing

QWEN3 = load_shape("qwen3_30b_a3b", SHAPES).shape
LONG_PROMPTS = Workload(samples=512, prompt=4096.0, response=512.0, longest=1024, group=8)
SHARED = Setup(
    QWEN3,
    hardware_named("ascend_910c"),
    Parallel(16, ep=16),
    Parallel(16, ep=16),
    training=TrainingLimits(token_budget=1 << 20),
    workload=LONG_PROMPTS,
)


def of(setup: Setup, share: str, **limits: int) -> Setup:
    return replace(setup, training=replace(setup.training, share_prefixes=share, **limits))


def test_training_computes_a_prompt_once_for_its_samples_and_what_links_cost() -> None:
    link = ROWS_OF_LINK + (4096 + 512) // READS_OF_ROW
    assert of(SHARED, "off").trained_rows == LONG_PROMPTS.tokens == 512 * 4608
    assert SHARED.trained_rows == 64 * (4608 + 7 * (512 + link))
    pairs = of(SHARED, "auto", token_budget=6000)  # two siblings in a micro-batch
    assert pairs.trained_rows == 64 * 4 * (4608 + 512 + link)
    assert of(SHARED, "auto", token_budget=4608).trained_rows == LONG_PROMPTS.tokens
    alone = replace(SHARED, workload=replace(LONG_PROMPTS, group=1))
    short = replace(SHARED, workload=replace(LONG_PROMPTS, prompt=78.0, response=1577.0))
    assert alone.trained_rows == LONG_PROMPTS.tokens and short.trained_rows == short.workload.tokens


def test_an_update_and_a_reference_take_as_much_less() -> None:
    rows = SHARED.trained_rows / LONG_PROMPTS.tokens
    assert 0.2 < rows < 0.3
    for seconds in (train_s, reference_s):
        assert seconds(SHARED) / seconds(of(SHARED, "off")) == pytest.approx(rows, rel=1e-6)


def test_the_largest_micro_batch_of_few_samples_is_smaller_and_never_larger_than_the_budget() -> None:
    """64 prompts on 16 replicas: four groups of eight samples each, of 5,120 tokens at most."""
    own = 1024 + ROWS_OF_LINK + 5120 // READS_OF_ROW
    assert SHARED.micro_batch_tokens == 4 * (5120 + 7 * own)
    assert of(SHARED, "off").micro_batch_tokens == 32 * 5120
    assert of(SHARED, "auto", token_budget=16384).micro_batch_tokens == 16384
    few = replace(SHARED, workload=replace(LONG_PROMPTS, samples=8))
    assert few.micro_batch_tokens == 5120, "one sample on a replica shares with none"
    shared, whole = (estimate_memory(of(SHARED, share)).phases["train"] for share in ("auto", "off"))
    assert shared["activations"] < 0.5 * whole["activations"]
    assert {**shared, "activations": 0.0} == {**whole, "activations": 0.0}


@given(st.integers(0, 5000), st.lists(st.integers(1, 1024), min_size=8, max_size=8), st.sampled_from(["auto", "off"]))
def test_a_group_of_shorter_prompts_and_responses_computes_no_more(
    prompt: int, responses: list[int], share: str
) -> None:
    """Also one whose prompt is too short to be shared."""
    one = of(replace(SHARED, train=Parallel(), workload=replace(LONG_PROMPTS, samples=8, prompt=5000.0)), share)
    lengths = [prompt + response for response in responses]
    taken = runs(lengths, links(lengths, [0, *[prompt] * 7], share), one.training.token_budget)
    assert sum(rows for _, rows in taken) <= one.micro_batch_tokens


def test_a_plan_says_what_is_shared() -> None:
    said = describe_sharing(SHARED)
    assert said.startswith("training.share_prefixes=auto: the 8 samples of a prompt share its 4,096 rows")
    assert said.endswith("training computes 71% fewer rows")
    assert "every row" in describe_sharing(of(SHARED, "off"))


TREES = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=12)


@given(TREES, st.sampled_from(SHARE_PREFIXES), st.integers(1, 8000), st.sampled_from([1, 4]))
def test_what_is_computed_lies_between_distinct_rows_and_all_of_them(tree, share, budget, scale):
    lengths = [length for length, _ in tree]
    common = [min(one, *pair) for (_, one), *pair in zip(tree, [0, *lengths], lengths, strict=False)]
    cost = TrainerCost(Pace(QWEN3, SHARED.hardware, scale, 1.0), Parallel(), share_prefixes=share)
    rows, pairs = cost.sizes(lengths, common, budget)
    modelled = [scale * length for length in lengths]
    distinct = sum(modelled) - scale * sum(common)
    assert distinct <= rows <= sum(modelled)
    assert distinct / 2 <= pairs <= sum(map(attention_pairs, modelled))
    least = cost.sizes(lengths, common, 1 << 62)
    assert least[0] <= rows and least[1] <= pairs, "nothing shares more than one micro-batch for all"
    if share == "off":
        assert (rows, pairs) == cost.sizes(lengths)


def test_a_step_of_siblings_costs_less_by_their_prompts() -> None:
    pace = Pace(QWEN3, SHARED.hardware, 1, 1.0)
    shared, whole = (TrainerCost(pace, Parallel(8, ep=8), share_prefixes=share) for share in ("auto", "off"))
    link = ROWS_OF_LINK + 4608 // READS_OF_ROW
    assert shared.sizes([4608, 4608], [0, 4096])[0] == 4608 + 512 + link
    lengths, common = [4608] * 16, [0, *[4096] * 7] * 2
    for seconds in (
        lambda cost: cost.train(lengths, common)["train"],
        lambda cost: cost.forward(lengths, "x", common)["x"],
    ):
        assert 0.2 < seconds(shared) / seconds(whole) < 0.6
    assert shared.train(lengths) == whole.train(lengths, common), "nothing is in common"
