import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusion.inference import Request, SamplingParams
from fusion.model import PackedAttention
from fusion.npu.operators import operators_of
from tests.helpers import tiny_hf
from tests.inference.engines import OPERATORS, by_id, card, engine, generate, generate_brokenly, model, requests, tokens


@pytest.mark.parametrize("experts", [True, False])
def test_greedy_equals_transformers_in_float64(experts):
    hf = tiny_hf(experts).double()
    if experts:
        hf.set_experts_implementation("eager")  # its grouped kernel has no float64
    wanted = requests(9, temperature=0)
    got = tokens(generate(engine(torch.float64, experts=experts), wanted))
    for request in wanted:
        ids = torch.tensor([request.prompt])
        want = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert got[request.id] == want[0, len(request.prompt) :].tolist()


def test_greedy_equals_transformers_in_float32_wherever_the_best_two_are_apart(operators):
    hf = tiny_hf()
    wanted = requests(9, temperature=0)
    got = tokens(generate(engine(), wanted))
    compared = 0
    for request in wanted:
        row = torch.tensor([request.prompt + tuple(got[request.id])])
        with torch.no_grad():
            logits = hf(row).logits[0, len(request.prompt) - 1 : -1]
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 1e-4
        compared += int(clear.sum())
        assert (logits.argmax(-1) == row[0, len(request.prompt) :])[clear].all()
    assert compared > 100


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_trainers_forward_pass(temperature, operators):
    wanted = requests(12, temperature=temperature)
    outputs = generate(engine(max_batch_tokens=64), wanted)
    for output in outputs:
        row = torch.tensor(output.prompt + tuple(output.tokens), device=model().device.torch_device)
        hidden = model()(row, torch.arange(len(row), device=row.device), PackedAttention([len(row)], model().operators))
        logprobs = F.log_softmax(model().head.logits(hidden) / temperature, -1)[len(output.prompt) - 1 : -1]
        want = logprobs.gather(1, row[len(output.prompt) :, None])[:, 0].cpu()
        assert torch.allclose(torch.tensor(output.logprobs), want, atol=1e-5, rtol=0)


SCHEDULES = [
    dict(max_seqs=1),
    dict(max_seqs=3, max_batch_tokens=8),
    dict(max_batch_tokens=64, block_size=32),
    dict(prefix_cache=False),
    dict(max_kv_tokens=160),
]


@pytest.mark.parametrize(
    ("operators", "rollout"),
    [
        pytest.param(how, rollout, marks=() if how == "fused" or "max_seqs" in rollout else pytest.mark.extended)
        for rollout in SCHEDULES
        for how in ("fused", "composed")
    ],
    ids=str,
    indirect=["operators"],
)
def test_no_schedule_changes_what_is_sampled(operators, rollout):
    wanted = requests(12)
    assert tokens(generate(engine(**rollout), wanted)) == tokens(generate(engine(), wanted))


@pytest.mark.parametrize("seed", range(4))
def test_no_history_changes_what_is_sampled(seed):
    wanted = requests(12)
    want = tokens(generate(engine(), wanted))
    made = engine(max_kv_tokens=160, max_batch_tokens=70)
    got = generate_brokenly(made, wanted, seed)
    assert {name: pair[0] for name, pair in got.items()} == want
    assert made.scheduler.blocks.available == 10


@pytest.mark.parametrize(
    ("operators", "dtype"),
    [pytest.param(*one, marks=pytest.mark.extended if one[1] is torch.float64 else ()) for one in OPERATORS],
    ids=str,
    indirect=["operators"],
)
def test_batch_invariant_logprobs_are_bitwise_equal_under_any_history(operators, dtype):
    wanted = requests(9, max_tokens=30)
    want = by_id(generate(engine(dtype, batch_invariant=True), wanted))
    for seed in range(3):
        little = dict(max_kv_tokens=(None, 160, 192)[seed], max_batch_tokens=(512, 70, 64)[seed])
        made = engine(dtype, batch_invariant=True, **little)
        assert generate_brokenly(made, wanted, seed) == want
    alone = {}
    for request in wanted:
        alone |= by_id(generate(engine(dtype, batch_invariant=True, prefix_cache=False), [request]))
    assert alone == want


def test_seed_and_request_id_choose_the_sample():
    wanted = requests(3)
    first = tokens(generate(engine(seed=1), wanted))
    assert first == tokens(generate(engine(seed=1), wanted))
    assert first != tokens(generate(engine(seed=2), wanted))
    assert len({tuple(row) for row in first.values()}) == 3  # siblings: one prompt, three answers


def test_noise_belongs_to_the_position_wherever_the_prompt_ends():
    params = SamplingParams(max_tokens=20, stop_token_ids=())
    (whole,) = generate(engine(), [Request("r", (5, 6, 7), params)])
    (rest,) = generate(engine(), [Request("r", (5, 6, 7, *whole.tokens[:8]), params)])
    assert rest.tokens[:12] == whole.tokens[8:]


def test_little_kv_preempts_and_changes_no_token():
    wanted = [Request(f"r{i}", (3, 4, 5), SamplingParams(max_tokens=80, stop_token_ids=())) for i in range(6)]
    made = engine(max_kv_tokens=128)
    assert tokens(generate(made, wanted)) == tokens(generate(engine(), wanted))
    assert made.status()["preemptions"] > 0
    assert made.scheduler.blocks.available == 8


def test_siblings_share_their_prompt_within_one_step():
    prompt = tuple(range(2, 30)) * 3
    made = engine()
    made.submit([Request(f"r{i}", prompt, SamplingParams(max_tokens=4)) for i in range(4)])
    made.step()
    made.step()
    assert made.status()["prefix_hit_tokens"] == 3 * len(prompt)
    used = made.scheduler.blocks.count - made.scheduler.blocks.available
    assert used <= len(prompt) // 16 + 4 * 2


def test_a_new_policy_version_drops_the_prefix_cache():
    made = engine()
    wanted = [Request(name, (7, 8, 9) * 20, SamplingParams(max_tokens=4)) for name in "abc"]
    generate(made, wanted[:1])
    generate(made, wanted[1:2])
    assert made.status()["prefix_hit_tokens"] == 48
    assert made.scheduler.blocks._cached
    made.policy_version = 7
    assert not made.scheduler.blocks._cached
    outputs = generate(made, wanted[2:])
    assert made.status()["prefix_hit_tokens"] == 48
    assert outputs[0].versions == [7] * len(outputs[0].tokens)


def test_what_bad_weights_left_behind_harms_no_later_version():
    made, wanted = engine(), requests(9)
    want = tokens(generate(made, wanted))
    old = made.model.norm.detach().clone()
    try:
        with torch.no_grad():
            made.model.norm.fill_(torch.nan)
            made.model.layers["0"].input_norm.fill_(torch.nan)
        made.policy_version = 1
        with pytest.raises(FloatingPointError, match="the logits of policy 1 are NaN"):
            generate(made, wanted)
    finally:
        with torch.no_grad():
            made.model.norm.copy_(old)
            made.model.layers["0"].input_norm.fill_(1.0)
    assert made.suspend()
    made.policy_version = 2
    assert tokens(generate(made, wanted)) == want


def test_requests_from_before_a_version_share_with_those_after_it():
    made = engine()
    made.submit([Request("before", (7, 8, 9) * 20, SamplingParams(max_tokens=9, stop_token_ids=()))])
    made.step()
    made.policy_version = 1
    made.submit([Request("after", (7, 8, 9) * 20, SamplingParams(max_tokens=9, stop_token_ids=()))])
    made.run()
    assert made.status()["prefix_hit_tokens"] == 48


def test_new_weights_in_the_middle_are_used_at_once_and_tokens_tell_their_version():
    made = engine()
    request = Request("r", (5, 6, 7) * 8, SamplingParams(max_tokens=20, stop_token_ids=()))
    made.submit([request])
    for _ in range(8):
        made.step()
    try:
        with torch.no_grad():
            made.model.layers["0"].input_norm.neg_()
        made.policy_version = 1
        (output,) = made.run()
        begun = 8
        assert output.versions == [0] * begun + [1] * (20 - begun)
        resumed = Request("r", request.prompt, request.params, response=tuple(output.tokens[:begun]))
        (fresh,) = generate(engine(), [resumed])
        assert fresh.tokens == output.tokens[begun:]
    finally:
        with torch.no_grad():
            made.model.layers["0"].input_norm.neg_()
    (with_old,) = generate(engine(), [request])
    assert with_old.tokens[:begun] == output.tokens[:begun] and with_old.tokens != output.tokens


def test_kv_memory_is_given_back_and_generation_goes_on_after_it_returns():
    wanted = requests(6)
    want = tokens(generate(engine(), wanted))
    device = model().device
    before = device.memory_by_owner()["kv"]
    made = engine()
    assert device.memory_by_owner()["kv"] - before > made.cache.block_bytes * made.capacity_tokens // 16
    made.submit(wanted)
    outputs = [output for _ in range(5) for output in made.step()]
    made.release_kv()
    assert device.memory_by_owner()["kv"] == before
    with pytest.raises(AssertionError, match="allocate_kv"):
        made.step()
    made.allocate_kv()
    assert tokens(outputs + made.run()) == want


def test_abort_from_another_thread_while_stepping():
    made = engine()
    made.submit([Request(f"r{i}", (3, 4), SamplingParams(max_tokens=200, stop_token_ids=())) for i in range(4)])
    started = threading.Event()

    def aborter():
        started.wait()
        made.abort(["r1", "r2", "nobody"])

    thread = threading.Thread(target=aborter)
    thread.start()
    made.step()
    started.set()
    outputs = {o.request_id: o for o in made.run()}
    thread.join()
    assert [outputs[f"r{i}"].finish_reason for i in range(4)] == ["length", "abort", "abort", "length"]
    assert 0 < len(outputs["r1"].tokens) < 200
    assert len(outputs["r1"].logprobs) == len(outputs["r1"].versions) == len(outputs["r1"].tokens)


def test_finish_reasons():
    stops = tuple(range(16))
    wanted = [
        Request("stop", (20,), SamplingParams(max_tokens=100, stop_token_ids=stops)),
        Request("length", (20,), SamplingParams(max_tokens=5, stop_token_ids=())),
        Request("chunk", (20,), SamplingParams(max_tokens=5, stop_token_ids=()), chunk_tokens=2),
        Request("last", (20,), SamplingParams(max_tokens=5, stop_token_ids=()), response=(1, 2, 3, 4), chunk_tokens=2),
    ]
    outputs = {o.request_id: o for o in generate(engine(), wanted)}
    assert {name: o.finish_reason for name, o in outputs.items()} == {
        "stop": "stop", "length": "length", "chunk": "chunk", "last": "length"
    }  # fmt: skip
    assert outputs["stop"].tokens[-1] in stops and not set(outputs["stop"].tokens[:-1]) & set(stops)
    assert [len(outputs[name].tokens) for name in ("length", "chunk", "last")] == [5, 2, 1]


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request("a", ()), "request 'a': the prompt is empty"),
        (Request("a", (32,)), r"request 'a': prompt\[0\]=32: expected token ids, whole numbers in \[0, 31\]"),
        (Request("a", (3,), SamplingParams(top_p=1.5)), "request 'a': params.top_p=1.5: expected a number in"),
        (Request("a", (3,), SamplingParams(max_tokens=300)), "rollout.max_length"),
        (Request("a", (3,) * 120, SamplingParams(max_tokens=100)), "rollout.engine.max_kv_tokens"),
        (Request("a", (3,), SamplingParams(max_tokens=2), response=(4, 5)), "has 2 tokens already"),
    ],
)
def test_a_request_that_cannot_work_is_refused_by_name(request_, message):
    made = engine(max_kv_tokens=128)
    with pytest.raises(ValueError, match=message):
        made.submit([Request("fine", (3,), SamplingParams(max_tokens=3)), request_])
    assert made.run() == []


def test_no_room_for_kv_names_the_keys():
    with pytest.raises(ValueError, match=r"rollout.engine.kv_fraction=1e-12 \(max_kv_tokens=null\)"):
        engine(kv_fraction=1e-12)


def test_a_forced_length_is_kept_over_chunks_and_end_tokens():
    wanted = [Request(f"f{n}", (3, 4, 1 + n), SamplingParams(max_tokens=30), exact_tokens=n) for n in (1, 7, 29, 30)]
    made = engine()
    free = tokens(generate(made, [replace(request, exact_tokens=0) for request in wanted]))
    outputs = {output.request_id: output for output in generate(made, wanted)}
    for request in wanted:
        output = outputs[request.id]
        assert len(output.tokens) == request.exact_tokens
        assert output.finish_reason == ("length" if request.exact_tokens == 30 else "stop")
        shared = min(len(free[request.id]), len(output.tokens))
        assert output.tokens[:shared] == free[request.id][:shared], "what is sampled stays the same"
    whole, response, reasons = outputs["f29"], (), []
    while len(response) < 29:
        (output,) = generate(made, [replace(wanted[2], response=response, chunk_tokens=10)])
        response, reasons = (*response, *output.tokens), [*reasons, output.finish_reason]
    assert list(response) == whole.tokens and reasons == ["chunk", "chunk", "stop"]


def test_forced_lengths_ignore_end_tokens_that_are_sampled():
    stop = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(32)))
    (short,) = generate(engine(), [Request("e", (3, 4), stop)])
    (forced,) = generate(engine(), [Request("e", (3, 4), stop, exact_tokens=40)])
    assert len(short.tokens) == 1 and len(forced.tokens) == 40


@pytest.mark.parametrize("exact, begun", [(-1, 0), (41, 0), (3, 3)])
def test_a_forced_length_that_cannot_be_is_refused(exact, begun):
    request = Request("e", (3, 4), SamplingParams(max_tokens=40), response=(5,) * begun, exact_tokens=exact)
    with pytest.raises(ValueError, match=f"request 'e': exact_tokens={exact}: expected 0, or more than the {begun}"):
        engine().submit([request])


def test_a_card_whose_operators_add_in_no_fixed_order_refuses_batch_invariance(monkeypatch):
    engine(batch_invariant=True).release_kv()
    monkeypatch.setattr(card(), "operators", operators_of("emulated", "plain"))
    for kind in ("cuda", "npu"):
        monkeypatch.setattr(card(), "kind", kind)
        with pytest.raises(ValueError, match=r"rollout\.engine\.batch_invariant=true: the operators 'plain'"):
            engine(batch_invariant=True)
