"""Run the parts `real`, `small` and `paced` of `benchmarks/drafts.py`: whether drafts pay, on engines and in runs."""

import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import torch

from benchmarks.drafts import FREE_BYTES, long_answer_model, prompts_of
from benchmarks.harness import Arguments, Figures, in_turns, rows_of
from benchmarks.models import PlainCpu, engine_of, model_of
from benchmarks.paced import MAX_OVERRUN, Measured, Mode, Workload, run
from benchmarks.runs import Row, make_base, temporary_folder
from fusion.inference import EmbeddedEngine, Request, SamplingParams, sequence
from fusion.inference.config import DraftsConfig
from fusion.model import Transformer
from fusion.rollout.drafts.budget import HOST
from fusion.rollout.drafts.drafter import TextDrafter
from tests.helpers import tiny_config

EARLIER, VOCABULARY = 8, 4096


def rate(engine: EmbeddedEngine) -> float:
    """Run an engine to the end of its requests; return tokens a CPU second."""
    before, start_s = engine.scheduler.counters.generated_tokens, time.thread_time()
    engine.run()
    return (engine.scheduler.counters.generated_tokens - before) / (time.thread_time() - start_s)


# ---- real


def real(args: Arguments) -> Figures:
    torch.set_num_threads(1)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, moe_intermediate_size=448)
    sizes |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts_per_tok=2)
    config = tiny_config(num_hidden_layers=args.layers, **sizes)
    model = model_of(config, PlainCpu(FREE_BYTES), std=0.03)

    def measure(live: int) -> Figures:
        sides = {name: partial(decoded, model, live, name == "drafts", args.new_tokens) for name in ("drafts", "plain")}
        drafts, plain = in_turns(sides, args.rounds, warm_ups=0).values()
        (drafts_per_s, accepted), (plain_per_s, _) = (map(median, zip(*side, strict=True)) for side in (drafts, plain))
        return {"ratio": drafts_per_s / plain_per_s, "accepted": accepted}

    return rows_of(args.live, measure)


def decoded(model: Transformer, live: int, drafts: bool, new_tokens: int, seed: int) -> tuple[float, float]:
    """Return tokens a CPU second of ``live`` sequences, and tokens of a sequence a forward pass. With drafts `EARLIER`
    responses to each prompt are known, which differ in a tenth of the tokens."""
    prompts = [tuple(random.Random(i).randrange(2, VOCABULARY) for _ in range(256)) for i in range(live)]
    params = SamplingParams(max_tokens=new_tokens, stop_token_ids=())
    requests = [Request(f"r{seed}-{i}", prompt, params, f"g{seed}-{i}") for i, prompt in enumerate(prompts)]
    drafter = TextDrafter.of(DraftsConfig(source="both" if drafts else "none"), HOST)
    engine = engine_of(model, drafter, max_length=512, max_seqs=live, max_batch_tokens=8192)
    if drafter is not None:
        draw, plain = random.Random(seed), engine_of(model, max_length=512, max_seqs=64)
        plain.submit(requests)
        said = {output.request_id: output.tokens for output in plain.run()}  # the same with drafts and without
        for request in requests:
            copies = (Request(f"e{i}", request.prompt, params, "e") for i in range(EARLIER))
            earlier = [sequence.Sequence.of(one, params, ()) for one in copies]
            for one in earlier:
                tokens = said[request.id]
                one.tokens += [draw.randrange(2, VOCABULARY) if draw.random() < 0.1 else token for token in tokens]
                drafter.draft([one], [0], 0)
            for one in earlier:
                drafter.end(one)
    engine.submit(requests)
    engine.step()
    per_s, status = rate(engine), engine.status()
    return per_s, 1 + status["accepted_tokens"] / max(1.0, status["decoded_sequences"])


# ---- small

EPOCHS = 3
CASES = {"8": (8, 1.0), "64": (64, 1.0), "64_unlike": (64, 4.0)}
"""Sequences that decode at a time, and the temperature: at 4 no text repeats"""


def small(args: Arguments) -> Figures:
    torch.set_num_threads(1)
    model = long_answer_model(args.base)

    def measure(name: str) -> Figures:
        rates = partial(_rates, model, *CASES[name], args.small_prompts)
        sides = {side: lambda _, side=side: rates(side == "drafts") for side in ("drafts", "plain")}
        found = in_turns(sides, args.rounds, warm_ups=0)
        drafts, plain = ([max(column) for column in zip(*rates, strict=True)] for rates in found.values())
        ratios = [one / other for one, other in zip(drafts, plain, strict=True)]
        return {"ratio": min(ratios)} | {f"epoch_{number}": ratio for number, ratio in enumerate(ratios, 1)}

    return rows_of(CASES, measure)


def _rates(model: Transformer, live: int, temperature: float, prompts: int, drafts: bool) -> list[float]:
    """Return tokens a CPU second in each epoch."""
    drafter = TextDrafter.of(DraftsConfig(source="both" if drafts else "none"), HOST)
    engine = engine_of(model, drafter, max_length=512, max_seqs=live)
    source, rates = prompts_of(prompts), []
    params = SamplingParams(max_tokens=96, temperature=temperature)
    for _ in range(EPOCHS):
        for prompt, i in product(source.next(), range(8)):
            priority = int(drafts and i > 0)
            engine.submit([Request(f"{prompt.id}/{i}", prompt.ids, params, prompt.id, priority=priority)])
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


def paced(args: Arguments) -> Figures:
    rows = args.paced_prompts * (MODE.warm + FIRST)
    task = ("data=worked", "data.max_prompt_length=64", f"data.rows={rows}", "training.lr=1e-4", "reward=arithmetic")
    workload = replace(WORKLOAD, cards=args.cards, prompts=args.paced_prompts, speed=args.speed, options=task)
    with temporary_folder() as folder:
        make_base(folder / "model", "worked_arithmetic", target=args.base)
        by_side = {side: run(MODE, workload, folder, MEASURED, options) for side, options in SIDES.items()}
    return compared({side: measured.rows for side, measured in by_side.items()}, workload)


def compared(rows_by_side: Mapping[str, Sequence[Row]], workload: Workload = WORKLOAD) -> Figures:
    """Return the figures of each side, over all steps that are valid and over those of each epoch, and how much shorter
    steps and tails are with a probe than without drafts."""
    steps = enumerate(zip(*rows_by_side.values(), strict=True))
    valid = [n for n, rows in steps if max(Measured(MODE, workload, [row]).overrun for row in rows) <= MAX_OVERRUN]
    epochs = {"all": valid, "first": [n for n in valid if n < FIRST], "second": [n for n in valid if n >= FIRST]}
    figures: Figures = {"steps": len(valid)}
    for epoch, chosen in epochs.items():
        if chosen:
            sides: Figures = {
                side: figures_of(Measured(MODE, workload, [rows[step] for step in chosen]))
                for side, rows in rows_by_side.items()
            }
            none, probe = sides["none"], sides["probe"]
            tail_cut = 1 - probe["tail_s"] / none["tail_s"] if none["tail_s"] else None
            figures[epoch] = sides | {"ratio": none["step_s"] / probe["step_s"], "tail_cut": tail_cut}
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
