"""A step of a die costs what it does: no free tokens, no tokens dearer for company."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.costmodel.attention import attention_cost
from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.presets import PUBLISHED_RUN, load_shape
from fusion.costmodel.roofline import CHUNK_TOKENS, Roofline, attention_pairs
from fusion.costmodel.setup import PUBLISHED_WORKLOAD
from fusion.model import Parallel
from tests.costmodel.counting import counting

ASCEND_910C = hardware_named("ascend_910c")
SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
ROOFLINES = [
    Roofline(load_shape(name, SHAPES).shape, ASCEND_910C, parallel)
    for name, parallel in (
        ("qwen3_30b_a3b", Parallel(8)),
        ("qwen3_30b_a3b", Parallel(8, tp=2, ep=4)),
        ("qwen3_30b_a3b", Parallel(8, tp=4, ep=2, pp=2)),
        ("pangu_718b", Parallel(32, tp=2, ep=32)),
    )
]
rooflines = st.sampled_from(ROOFLINES)
sequences = st.integers(1, 512)
contexts = st.integers(1, 40_000)
EXACT = 1 + 1e-9


@given(rooflines, sequences, contexts, st.integers(0, 5000), st.tuples(sequences, contexts, contexts))
def test_more_of_anything_takes_longer_and_is_more_work(roofline, batch, context, prompt, more):
    kv = batch * context
    all_of_it = [roofline, *(counting(roofline, what) for what in ("flops", "hbm", "links"))]
    small = [one.engine_step_s(batch, kv, prompt, attention_pairs(prompt)) for one in all_of_it]
    for extra in (
        (more[0], 0, 0, 0),
        (0, more[1], 0, 0),
        (0, 0, more[2], attention_pairs(more[2])),
        (0, 0, 0, more[1]),
    ):
        sizes = [a + b for a, b in zip((batch, kv, prompt, attention_pairs(prompt)), extra, strict=True)]
        large = [one.engine_step_s(*sizes) for one in all_of_it]
        assert all(more >= less for more, less in zip(large, small, strict=True))


@pytest.mark.parametrize("tp", [1, 8])
def test_absorbed_decoding_reads_the_latents_once_for_all_heads(tp):
    """A latent of 512 channels and a rotated key of 64, which every TP rank reads for its share of 128 heads."""
    roofline = Roofline(load_shape("deepseek_r1_671b", SHAPES).shape, ASCEND_910C, Parallel(8, tp=tp, ep=8))
    tokens, layers, heads = 100_000, 61, 128 // tp
    flops, hbm = (counting(roofline, what).engine_step_s for what in ("flops", "hbm"))
    assert hbm(64, tokens) - hbm(64, 0) == pytest.approx(tokens * layers * 2 * (512 + 64))
    assert flops(64, tokens) - flops(64, 0) == pytest.approx(tokens * layers * heads * 2 * ((512 + 64) + 512))
    assert hbm(64, 0, attended=tokens) == hbm(64, 0)
    prefill = flops(64, 0, attended=tokens) - flops(64, 0)
    assert prefill == pytest.approx(tokens * layers * heads * 2 * ((128 + 64) + 128))


@given(rooflines, sequences, contexts, st.integers(1, 8))
def test_drafts_attend_as_decoded_tokens_and_read_the_cache_no_more_often(roofline, batch, context, drafted):
    tokens, pairs = batch * drafted, batch * attention_pairs(drafted, context)
    flops, hbm = (counting(roofline, what).engine_step_s for what in ("flops", "hbm"))
    of_flops, read = (step(batch, batch * context, prefill_tokens=tokens, drafted_pairs=pairs) for step in (flops, hbm))
    assert of_flops == pytest.approx(flops(batch + tokens, batch * context + pairs))
    assert read < hbm(batch + tokens, batch * context + pairs)
    assert read == pytest.approx(hbm(batch + tokens, batch * context))


@given(rooflines, sequences, sequences, contexts)
def test_a_batch_costs_less_than_its_parts_and_more_than_either(roofline, one, other, context):
    alone = [roofline.engine_step_s(batch, batch * context) for batch in (one, other)]
    both = roofline.engine_step_s(one + other, (one + other) * context)
    assert max(alone) <= both < sum(alone)
    single = roofline.engine_step_s(1, context)
    assert alone[0] <= one * single * EXACT


@given(rooflines, sequences, contexts, st.integers(1, 4000), contexts)
def test_a_prefill_beside_a_decode_costs_less_than_after_it(roofline, batch, context, prompt, before):
    kv, attended = batch * context, attention_pairs(prompt, before)
    mixed = roofline.engine_step_s(batch, kv, prompt, attended)
    apart = roofline.engine_step_s(batch, kv) + roofline.prefill_s(prompt, attended)
    assert roofline.engine_step_s(batch, kv) <= mixed < apart


@given(rooflines, sequences, contexts, sequences)
def test_the_ideal_is_at_most_the_step_and_all_of_it_in_a_full_batch(roofline, batch, context, more):
    kv, took = batch * context, roofline.engine_step_s(batch, batch * context)
    ideal = roofline.ideal_decode_s(batch, kv, batch + more)
    assert 0 < ideal < took
    assert roofline.ideal_decode_s(batch, kv, batch) == pytest.approx(took)
    assert ideal >= roofline.ideal_decode_s(batch, kv, batch + more + 1) / EXACT
    assert roofline.ideal_decode_s(0, 0, batch) == 0


@given(rooflines, st.integers(1, 20), st.integers(1, 20), st.integers(1, 8000), st.booleans())
def test_training_adds_up_over_whole_micro_batches(roofline, one, other, length, recompute):
    budget = 8 * length
    if roofline.parallel.pp > 1:
        other = one  # the bubble is shared by the micro-batches

    def train(count, of=roofline):
        return of.train_step_s(count * budget, count * 8 * attention_pairs(length), budget, recompute)

    def work(count, what):
        return train(count, counting(roofline, what)) / (1 + (roofline.parallel.pp - 1) / count)

    for what in ("flops", "hbm"):
        assert work(one + other, what) == pytest.approx(work(one, what) + work(other, what))
    parts, whole = train(one) + train(other), train(one + other)
    if roofline.parallel.pp == 1:
        assert whole == pytest.approx(parts)
    assert train(one) < whole <= parts * EXACT
    assert roofline.forward_s(one * budget, one * 8 * attention_pairs(length), budget) < train(one)


@given(st.integers(1, 60_000))
@settings(max_examples=30)
def test_a_long_prompt_is_cut_and_nothing_of_it_is_lost(tokens):
    roofline = ROOFLINES[0]
    chunks, flops = -(-tokens // CHUNK_TOKENS), counting(roofline, "flops")
    in_chunks = flops.prefill_s(tokens, attention_pairs(tokens))
    assert in_chunks == pytest.approx(flops.engine_step_s(0, 0, tokens, attention_pairs(tokens)))
    assert roofline.prefill_s(tokens, attention_pairs(tokens)) >= chunks * roofline.engine_step_s(0, 0, 1, 0)
    assert roofline.prefill_s(0, 0) == 0


def test_a_decode_step_reads_the_experts_its_tokens_are_routed_to():
    alone, spread = ROOFLINES[0], ROOFLINES[1]
    assert alone.experts_read(0) == 0 and alone.experts_read(1) == pytest.approx(8 / 128)
    assert alone.experts_read(1) < alone.experts_read(16) < alone.experts_read(256) < 1
    assert spread.experts_read(1) == pytest.approx(alone.experts_read(2)), "EP4 over TP2: two ranks bring a token each"
    experts = alone.shape.routed * 2
    read = [counting(alone, "hbm").engine_step_s(batch, 0) for batch in (1, 400)]
    assert read[0] < 0.15 * experts and read[1] > experts


def test_a_dense_model_reads_its_weights_once_a_step():
    shape = load_shape("qwen3_30b_a3b", SHAPES).shape
    dense = Roofline(shape, ASCEND_910C, Parallel(2, tp=2))
    assert dense.optimizer_link_bytes == 0, "no replicas"
    replicated = Roofline(shape, ASCEND_910C, Parallel(2))
    assert replicated.optimizer_link_bytes == counting(replicated, "links").optimizer_step_s() > 0
    touched, alone = (counting(one, "hbm").optimizer_step_s() for one in (replicated, dense))
    assert touched < 2 * alone


def test_the_published_run_takes_about_as_long_as_it_took():
    """DeepSeek-R1 on 128 Atlas A3 cards: 319.3 s for the update; 373.65 s for the rollout, of which the model took less
    than 60 %, with 76 ms a step of 64 sequences (cann-recipes-train)."""
    name, _, train, infer = PUBLISHED_RUN
    shape, work = load_shape(name, SHAPES).shape, PUBLISHED_WORKLOAD
    trained = Roofline(shape, ASCEND_910C, train)
    length = work.prompt + work.response
    update_s = trained.train_step_s(work.tokens / train.dp, work.samples / train.dp * attention_pairs(length), 16384)
    assert update_s + trained.optimizer_step_s() == pytest.approx(319.3, rel=0.15)
    generating = Roofline(shape, ASCEND_910C, infer)
    sequences = work.samples / (infer.world // infer.tp)
    step_s = generating.engine_step_s(sequences, sequences * (work.prompt + work.response / 2))
    assert work.longest * step_s == pytest.approx(0.6 * 373.65, rel=0.1)
    assert generating.engine_step_s(64, 64 * 1600) == pytest.approx(76e-3, rel=0.01)


@pytest.mark.parametrize("model, layout", [("pangu_718b", Parallel(256, tp=2, ep=128)), ("olmoe_7b", Parallel(1))])
@pytest.mark.parametrize("pp", [1, 3])
def test_an_engine_step_is_the_maximum_of_its_lines(model, layout, pp):
    layout = Parallel(layout.world * pp, tp=layout.tp, ep=layout.ep, pp=pp)
    roofline = Roofline(load_shape(model, SHAPES).shape, hardware_named("ascend_910c"), layout)
    for sequences, kv, tokens, attended in ((1, 5, 0, 0), (64, 400_000, 0, 0), (3, 900, 700, 9e5), (0.5, 3, 4096, 8e6)):
        step_s = summed_s(roofline, sequences + tokens, kv, attended)
        lines = roofline.step_lines(sequences + tokens)
        assert max(line(kv, attended) for line in lines) == pytest.approx(step_s, rel=1e-12)
        computed = roofline.engine_step_s(sequences, kv, prefill_tokens=tokens, attended=attended)
        assert computed == pytest.approx(step_s, rel=1e-12)


def summed_s(roofline: Roofline, tokens: float, kv: float, attended: float) -> float:
    """Add up the stages of a step, each bound by its operations or by its reads."""
    hardware, shape = roofline.hardware, roofline.shape
    flops_per_s = hardware.flops.value * hardware.forward_reached.value
    total = roofline.exchanges * hardware.collective_s.value + shape.config.num_layers * hardware.layer_s.value
    for stage in roofline._stages:
        decoded = kv * stage.layers * shape.attention.decode_pair_flops / roofline.parallel.tp
        read = 2 * (stage.dense + stage.experts * roofline.experts_read(tokens))
        read += (kv + tokens) * stage.layers * 2 * shape.attention.kv_elements_of_rank(roofline.parallel.tp)
        flops_s = (roofline._flops(stage, tokens, attended) + decoded) / flops_per_s
        total += max(flops_s, read / hardware.hbm_bytes_per_s.value) + roofline._links_s(stage, tokens, passes=1)
    return max(total, roofline.launch_floor_s)


@pytest.mark.parametrize(
    ("tp", "cp", "sent_heads"),
    [(1, 1, 4), (1, 2, 4), (1, 4, 4), (1, 8, 8), (2, 4, 4), (1, 6, 12), (4, 2, 2), (8, 3, 3)],
)
def test_context_parallelism_repeats_keys_and_values_until_every_rank_has_whole_heads(tp, cp, sent_heads):
    """Four KV heads; a TP rank has at least one."""
    spec = load_shape("qwen3_30b_a3b", SHAPES).shape.config.attention
    assert spec.num_kv_heads == 4
    assert attention_cost(spec).repeated_elements(tp, cp) == sent_heads * 2 * spec.head_dim
