"""An embedded engine and vLLM on the same weights, in processes of their own, and what tests make both do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fusion.inference import EmbeddedEngine, InferEngine, Output, Request, SamplingParams
from fusion.inference.stop_strings import StopStrings
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.model.holder import WeightHolder
from fusion.npu import Device
from fusion.rollout.drafts.drafter import TextDrafter
from tests.inference.engines import requests
from tests.inference.test_verification import Guesses
from tests.rollouts import rollout_config

LENGTH = 256
STEPS = 250
"""Enough to end all requests of `broken_off_and_resumed`"""


def build(
    device: Device,
    folder: str,
    parallel: Parallel,
    stop_strings: StopStrings | None = None,
    masked_ids: tuple[tuple[int, int], ...] = (),
    routing: bool = False,
    truth: dict[str, list[int]] | None = None,
    **rollout: Any,
) -> dict[str, tuple[WeightHolder, InferEngine]]:
    """Models and engines by backend, KV allocated. Collective. ``truth``: vLLM verifies drafts around these tokens, and
    the embedded engine none; None: both draft as the config says."""
    from fusion.inference.backends.vllm_engine import VllmEngine
    from fusion.inference.backends.vllm_model import VllmModel

    mesh, shape = Mesh.create(parallel), replace(ModelConfig.from_hf(folder), masked_ids=masked_ids)
    config = rollout_config(**(dict(max_length=LENGTH, max_seqs=8, max_batch_tokens=64, max_kv_tokens=1024) | rollout))
    models: dict[str, Any] = {
        "embedded": Transformer(shape, mesh, device, torch.float32),
        "vllm": VllmModel(shape, mesh, device, torch.float32, rollout=config, routing=routing),
    }
    engines: dict[str, Any] = {"embedded": EmbeddedEngine, "vllm": VllmEngine}
    made = {}
    for name, model in models.items():
        load_weights(model, folder)
        drafter: Any = TextDrafter.of(config.drafts, single_paths=True)
        if truth is not None and name == "vllm":
            drafter = Guesses(truth, right=0.8, children=1)
        options = dict(routing=routing, stop_strings=stop_strings, drafter=drafter)
        engine = engines[name](model, mesh, device, config, seed=5, **options)
        engine.allocate_kv()
        made[name] = model, engine
    return made


def of_both(rank: int, device: Device, folder: str, parallel: Parallel, scenario: Callable, rollout: dict) -> dict:
    """What a scenario returns, by backend: called on every rank with (engine, model, is rank 0)."""
    return {
        name: scenario(engine, model, rank == 0)
        for name, (model, engine) in build(device, folder, parallel, **rollout).items()
    }


def run(engine: InferEngine) -> list[Output]:
    outputs = engine.step()
    while not engine.idle:
        outputs += engine.step()
    return outputs


def arriving_in_two_waves(engine: InferEngine, model: WeightHolder, leads: bool) -> tuple[list[Output], dict]:
    filtered = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.02, max_tokens=30)
    wanted = requests(12) + [Request("filtered", (4, 5, 6, 7), filtered)]
    wanted += [Request("greedy", (4, 5, 6), SamplingParams(temperature=0, max_tokens=30))]
    if leads:
        engine.submit(wanted[:5])
    outputs = engine.step() + engine.step()
    if leads:
        engine.submit(wanted[5:])
    outputs += run(engine)
    return outputs, engine.status()


def broken_off_and_resumed(engine: InferEngine, model: WeightHolder, leads: bool) -> tuple[list[Output], dict]:
    """Chunks, aborts, a suspension, new versions and a release of the KV, at the same steps on every rank. The caller
    resumes what has ended early, as a run does."""
    by_id = {request.id: request for request in requests(12)}
    todo, got = list(by_id.values()) if leads else [], dict[str, tuple[int, ...]]()
    outputs: list[Output] = []
    for step in range(STEPS):
        if leads and todo:
            for request in todo[: 1 + step % 3]:
                engine.submit([replace(request, response=got.get(request.id, ()), chunk_tokens=(0, 7)[step % 2])])
            del todo[: 1 + step % 3]
        if leads and step % 9 == 4 and step < 100:
            engine.abort([f"r{step % 12}", f"r{(step + 5) % 12}", "nobody"])
        if step in (11, 31):
            engine.policy_version += 1
        if step == 21:
            engine.release_kv()
            engine.allocate_kv()
        if step in (16, 40):
            engine.pause() if leads else None
        ended = engine.suspend() if step in (14, 33) else engine.step()
        assert engine.paused == (step in (16, 40))
        engine.resume()
        outputs += ended
        for output in ended if leads else ():
            got[output.request_id] = (*got.get(output.request_id, ()), *output.tokens)
            if output.finish_reason in ("chunk", "abort"):
                todo.append(by_id[output.request_id])
    assert engine.idle and not todo
    return outputs, engine.status()


def adopting_new_weights(engine: InferEngine, model: WeightHolder, leads: bool) -> list[Output]:
    """New weights between two steps, while requests run; nothing of the prefix cache is older."""
    adopted = []

    def on_adopt(version: int) -> None:
        adopted.append(version)
        for name, view in model.weights.views.items():
            if "norm" in name and view.dim() == 1 and view.numel() == model.config.hidden_size:
                view.mul_(torch.linspace(0.5, 1.5, view.numel(), device=view.device))

    engine.on_adopt = on_adopt
    params = SamplingParams(max_tokens=24, stop_token_ids=())
    wanted = [Request(f"a{i}", (5, 6, 7 + i % 3) * 8, params, group=f"{i % 3}") for i in range(6)]
    if leads:
        engine.submit(wanted)
    outputs = [output for _ in range(8) for output in engine.step()]
    if leads:
        engine.adopt(3)
    outputs += engine.step()
    assert adopted == [3] and engine.policy_version == 3
    outputs += run(engine)
    if leads:
        engine.submit([replace(wanted[0], id="after")])
    return outputs + run(engine)


def ending_in_every_way(engine: InferEngine, model: WeightHolder, leads: bool) -> list[Output]:
    whole, stops = SamplingParams(max_tokens=20, stop_token_ids=()), tuple(range(16))
    wanted = [
        Request("length", (3, 4), whole),
        Request("stop", (3, 4), SamplingParams(max_tokens=20, stop_token_ids=stops)),
        Request("chunk", (3, 4, 5), whole, chunk_tokens=6),
        Request("resumed", (3, 4, 5), whole, response=(9, 8, 7), chunk_tokens=5, earlier="e"),
        Request("exact", (3, 4), SamplingParams(max_tokens=20, stop_token_ids=stops), exact_tokens=11),
        Request("exact and long", (3, 4), whole, exact_tokens=20),
        Request("string", (6, 4), whole),
    ]
    if leads:
        engine.submit(wanted)
    return run(engine)


def in_order_of_priority(engine: InferEngine, model: WeightHolder, leads: bool) -> list[str]:
    """With room for one sequence: the order in which requests end."""
    params = SamplingParams(max_tokens=4, stop_token_ids=())
    if leads:
        engine.submit([Request(f"p{i}", (3, 4, i + 1), params, priority=p) for i, p in enumerate((5, 1, 0, 5, 1))])
    return [output.request_id for output in run(engine)]


def crowding_the_kv(engine: InferEngine, model: WeightHolder, leads: bool) -> tuple[list[Output], dict]:
    params = SamplingParams(max_tokens=80, stop_token_ids=())
    if leads:
        engine.submit([Request(f"r{i}", (3, 4, 5), params) for i in range(6)])
    return run(engine), engine.status()


def surviving_bad_weights(engine: InferEngine, model: WeightHolder, leads: bool) -> tuple[str, list[Output]]:
    if leads:
        engine.submit(requests(6))
    run(engine)
    spoiled = {name: view.clone() for name, view in model.weights.views.items() if "norm" in name}
    for name in spoiled:
        model.weights.views[name].fill_(torch.nan)
    engine.policy_version = 1
    if leads:
        engine.submit(requests(6))
    try:
        run(engine)
        error = ""
    except FloatingPointError as caught:
        error = str(caught)
    for name, values in spoiled.items():
        model.weights.views[name].copy_(values)
    engine.suspend()
    engine.policy_version = 2
    if leads:
        engine.submit(requests(6))
    return error, run(engine)


def counting_memory(engine: InferEngine, model: WeightHolder, leads: bool) -> tuple[int, int, int]:
    """Bytes of KV on the card while it is allocated, released, and allocated again."""
    sizes = []
    for change in (lambda: None, engine.release_kv, engine.allocate_kv):
        change()
        sizes.append(model.device.memory_by_owner()["kv"])
    engine.release_kv()
    return sizes[0], sizes[1], sizes[2]


def repeating_themselves(engine: InferEngine, model: WeightHolder, leads: bool) -> tuple[list[Output], dict]:
    """Siblings that say nearly the same, the second half after the first."""
    wanted, outputs = requests(12, temperature=0.2), list[Output]()
    for half in (wanted[::2], wanted[1::2]):
        if leads:
            engine.submit(half)
        outputs += run(engine)
    return outputs, engine.status()


def sharing_prompts(engine: InferEngine, model: WeightHolder, leads: bool) -> int:
    """Prefix hits of a prompt of five blocks that was there before."""
    params = SamplingParams(max_tokens=3, stop_token_ids=())
    for name in ("first", "second"):
        if leads:
            engine.submit([Request(name, tuple(range(2, 30)) * 3, params)])
        run(engine)
    return int(engine.status()["prefix_hit_tokens"])
