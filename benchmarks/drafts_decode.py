"""Run the parts `real`, `small` and `paced` of `benchmarks/drafts.py`: whether drafts pay, on engines and in runs."""

from __future__ import annotations

import gc
import random
import shutil
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.drafts import FREE_BYTES, base_model, long_answer_model
from benchmarks.harness import Figures, in_turns, progress
from benchmarks.models import PlainCpu, engine_of, randomise
from benchmarks.paced import MAX_OVERRUN, Measured, Mode, Workload, run
from benchmarks.runs import Row, temporary_folder
from fusion.inference import EmbeddedEngine, Request, SamplingParams, sequence
from fusion.inference.config import DraftsConfig
from fusion.model import Mesh, Transformer
from fusion.rollout.drafts.drafter import TextDrafter
from tests.helpers import tiny_config

EARLIER, VOCABULARY = 8, 4096


def rate(engine: EmbeddedEngine) -> float:
    """Run an engine to the end of its requests; return tokens a CPU second."""
    before, start_s = engine.scheduler.counters.generated_tokens, time.thread_time()
    engine.run()
    return (engine.scheduler.counters.generated_tokens - before) / (time.thread_time() - start_s)


# ---- real


def real(args: Namespace) -> Figures:
    """Decode with drafts and without, in turns."""
    torch.set_num_threads(1)
    device: Any = PlainCpu(FREE_BYTES)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, moe_intermediate_size=448)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts_per_tok=2)
    config = tiny_config(num_hidden_layers=args.layers, **sizes)
    model = randomise(Transformer(config, Mesh.single(), device), std=0.03)
    figures: Figures = {}
    for live in args.live:
        sides = {name: partial(decoded, model, live, name == "drafts", args.new_tokens) for name in ("drafts", "plain")}
        found = in_turns(sides, args.rounds, warm_ups=0)
        rates = {name: median(rate for rate, _ in results) for name, results in found.items()}
        figures[str(live)] = {
            "ratio": rates["drafts"] / rates["plain"],
            "accepted": median(per_forward for _, per_forward in found["drafts"]),
        }
        progress(f"{live} live", figures[str(live)])
    return figures


def decoded(model: Transformer, live: int, drafts: bool, new_tokens: int, seed: int) -> tuple[float, float]:
    """Return tokens a CPU second of ``live`` sequences, and tokens of a sequence a forward pass. With drafts `EARLIER`
    responses to each prompt are known, which differ in a tenth of the tokens."""
    prompts = [tuple(random.Random(i).randrange(2, VOCABULARY) for _ in range(256)) for i in range(live)]
    params = SamplingParams(max_tokens=new_tokens, stop_token_ids=())
    requests = [Request(f"r{seed}-{i}", prompt, params, f"g{seed}-{i}") for i, prompt in enumerate(prompts)]
    drafter = TextDrafter.of(DraftsConfig(source="both" if drafts else "none"))
    engine = engine_of(model, drafter, max_length=512, max_seqs=live, max_batch_tokens=8192)
    if drafter is not None:
        draw, known = random.Random(seed), _said(model, requests)
        for request in requests:
            earlier = [
                sequence.Sequence.of(Request(f"e{i}", request.prompt, params, "e"), params, ()) for i in range(EARLIER)
            ]
            for one in earlier:
                said = known[request.id]
                one.tokens += [draw.randrange(2, VOCABULARY) if draw.random() < 0.1 else token for token in said]
                drafter.draft([one], [0], 0)
            for one in earlier:
                drafter.end(one)
    engine.submit(requests)
    engine.step()
    per_s, status = rate(engine), engine.status()
    return per_s, 1 + status["accepted_tokens"] / max(1.0, status["decoded_sequences"])


_known: dict[str, list[int]] = {}


def _said(model: Transformer, requests: list[Request]) -> dict[str, list[int]]:
    """Return what each request says: the same with drafts and without."""
    if missing := [request for request in requests if request.id not in _known]:
        engine = engine_of(model, max_length=512, max_seqs=64)
        engine.submit(missing)
        _known.update({output.request_id: list(output.tokens) for output in engine.run()})
    return {request.id: _known[request.id] for request in requests}


# ---- small

EPOCHS = 3
CASES = {"8": (8, 1.0), "64": (64, 1.0), "64_unlike": (64, 4.0)}
"""Sequences that decode at a time, and the temperature: at 4 no text repeats"""


def small(args: Namespace) -> Figures:
    """Generate three epochs of long answers with drafts and a probe, and without, in turns."""
    torch.set_num_threads(1)
    model, figures = long_answer_model(args.model, args.base), dict[str, Any]()
    for name, (live, temperature) in CASES.items():
        rates = partial(_rates, model, live, temperature, args.small_prompts)
        sides = {side: lambda _, side=side, rates=rates: rates(side == "drafts") for side in ("drafts", "plain")}
        found = in_turns(sides, args.rounds, warm_ups=0)
        best = {side: [max(column) for column in zip(*rates, strict=True)] for side, rates in found.items()}
        ratios = [drafts / plain for drafts, plain in zip(best["drafts"], best["plain"], strict=True)]
        figures[name] = {"ratio": min(ratios)} | {f"epoch_{number}": ratio for number, ratio in enumerate(ratios, 1)}
        progress(name, figures[name])
    return figures


def _rates(model: Transformer, live: int, temperature: float, prompts: int, drafts: bool) -> list[float]:
    """Return tokens a CPU second in each epoch."""
    from stalesync.prompts import DataConfig, PromptSource, make_tokenizer

    drafter = TextDrafter.of(DraftsConfig(source="both" if drafts else "none"))
    engine = engine_of(model, drafter, max_length=512, max_seqs=live)
    data = DataConfig(source="worked_arithmetic", rows=prompts, prompts_per_step=prompts)
    source, rates = PromptSource(data, make_tokenizer(), seed=0), []
    params = SamplingParams(max_tokens=96, temperature=temperature)
    for _ in range(EPOCHS):
        engine.submit(
            Request(f"{prompt.id}/{i}", prompt.ids, params, prompt.id, priority=int(drafts and i > 0))
            for prompt in source.next()
            for i in range(8)
        )
        gc.collect()  # else one of 0.1 s falls into some epochs of half a second
        rates.append(rate(engine))
    return rates


# ---- paced

MODE = Mode("colocated", 0)
FIRST, MEASURED = 3, 5
"""Measured steps of the first epoch, and of both"""
SIDES = {
    "none": ("rollout.drafts.source=none",),
    "drafts": ("rollout.drafts.source=both", "rollout.schedule.probe=0"),
    "probe": ("rollout.drafts.source=both", "rollout.schedule.probe=1"),
}
WORKLOAD = Workload(median=None, cap=96, sequences=16, tokens=16, speed=4.8)


def paced(args: Namespace) -> Figures:
    """Run the same steps without drafts, with drafts, and with a probe in every group."""
    rows = args.paced_prompts * (MODE.warm + FIRST)
    task = ("data=worked", "data.max_prompt_length=64", f"data.rows={rows}", "training.lr=1e-4", "reward=arithmetic")
    workload = replace(WORKLOAD, cards=args.cards, prompts=args.paced_prompts, speed=args.speed, options=task)
    with temporary_folder() as folder:
        shutil.copytree(base_model(args.model, args.base, folder), folder / "model")
        by_side = {side: run(MODE, workload, folder, MEASURED, options) for side, options in SIDES.items()}
    return compared({side: measured.rows for side, measured in by_side.items()}, workload)


def compared(rows_by_side: Mapping[str, Sequence[Row]], workload: Workload = WORKLOAD) -> Figures:
    """Return the figures of each side, over all steps that are valid and over those of each epoch, and how much shorter
    steps and tails are with a probe than without drafts."""
    steps = list(zip(*rows_by_side.values(), strict=True))
    valid = [
        number
        for number, rows in enumerate(steps)
        if max(Measured(MODE, workload, [row]).overrun for row in rows) <= MAX_OVERRUN
    ]
    epochs = {"all": valid, "first": [n for n in valid if n < FIRST], "second": [n for n in valid if n >= FIRST]}
    figures: Figures = {"steps": len(valid)}
    for epoch, chosen in epochs.items():
        if not chosen:
            continue
        sides = {
            side: figures_of(Measured(MODE, workload, [dict(rows[step]) for step in chosen]))
            for side, rows in rows_by_side.items()
        }
        none, probe = sides["none"], sides["probe"]
        ratios = {
            "ratio": none["step_s"] / probe["step_s"],
            "tail_cut": 1 - probe["tail_s"] / none["tail_s"] if none["tail_s"] else None,
        }
        figures[epoch] = sides | ratios
    return figures


def figures_of(measured: Measured) -> Figures:
    """Return means over steps; seconds are modelled ones, tokens those of the run."""
    speed = measured.workload.speed
    return {
        "step_s": measured.step_s * speed,
        "tail_s": measured.mean("timing_s/gen_tail") * speed,
        "tokens_per_forward": measured.mean("rollout/tokens_per_forward_mean"),
        "overrun": measured.overrun,
    }
