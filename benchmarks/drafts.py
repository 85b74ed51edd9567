"""Measure drafts: how many tokens a forward pass yields, and whether that pays.

engines: what a model says to the prompts of the long-answer task in two epochs, 16 responses a prompt, temperature 1,
replayed on 1, 2 and 4 engines, with the exchange of text and without: siblings of a group divided over the engines,
which together decode four of them at a time; history of a group that another engine had in the last epoch; both. Bytes
sent and received a token, CPU microseconds of an engine a step, and of the store a token.

texts (with --texts FILE): the same for recorded texts of a model, rows {"prompt": …, "samples": […, …]}, through the
drafter itself, from siblings side by side, from history, and from both. The first half of a problem's samples are its
responses, the others those of the epoch before. `held_out`: problems that served no choice of a constant of the
drafter, those whose prompt has an odd digest; `tuned`: the others. The tokenizer is a byte-level BPE of 8,192 tokens
made of the texts.

real: tokens a second of a 52M-parameter model with drafts and without, in turns, at 1 to 32 running sequences; eight
earlier responses to each prompt are known, which differ from it in a tenth of their tokens. small: the same of the
long-answer model, whose steps take about a millisecond, over three epochs; also where no text repeats. paced: whole
runs at staleness 0 on eight emulated cards that take the time of 910C dies under OLMoE-1B-7B, with the long-answer
task: seconds of a step and of its tail (in which at most a tenth of its samples is still generated) without drafts,
with drafts, and with drafts and a probe in every group. Steps in which a card was late on any side are left out on all.
"""

import gc
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, rows_of


def check(args: Arguments) -> str:
    if args.texts and "texts" not in args.parts:
        return "--texts has an effect with --only texts"
    return "--only texts needs --texts" if "texts" in args.parts and not (args.texts or args.smoke) else ""


BENCHMARK = Benchmark(
    __doc__,
    [
        Option("texts", None, help="of `texts`: recorded texts"),
        Option("prompts", 16, smoke=2, help="of `engines`"),
        Option("rounds", 3, smoke=1, help="of `real`, `small`"),
    ],
    "texts.held_out.both.tokens_per_forward >= 2.4, real.[124].ratio >= 1.8, real.[124].accepted >= 3.5, "
    "real.32.ratio >= 0.95, small.*.ratio >= 0.95, paced.all.ratio >= 1.5",
    parts={part: part for part in ("engines", "texts", "real", "small", "paced")},
    default=("engines", "real", "small", "paced"),
    check=check,
    sizes={"base": ("", "0"), "layers": (8, 1), "live": ((1, 2, 4, 8, 32), (1, 2)), "new_tokens": (128, 8)}
    | {"small_prompts": (64, 2), "cards": (8, 1), "paced_prompts": (64, 2), "speed": (4.8, 200.0)},
)
BENCHMARK.run_as(__name__)

import torch

from benchmarks.models import PlainCpu, engine_of, model_of
from benchmarks.paced import MAX_OVERRUN, Measured, Mode, Workload, run
from benchmarks.runs import Row, make_base, temporary_folder
from fusion.inference import EmbeddedEngine, Request, SamplingParams, sequence
from fusion.inference.config import DraftsConfig
from fusion.inference.verification import Verification
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.rollout.drafts.budget import HOST
from fusion.rollout.drafts.drafter import TextDrafter
from stalesync.prompts import DataConfig, PromptSource, make_tokenizer
from tests.helpers import tiny_config
from tests.rollout.drafts.modelled_engines import Cluster, Tokens

GROUP = 16
FREE_BYTES = 3 << 30


class Problem(NamedTuple):
    """``epochs``: what its group says in the first epoch and in the second; ``held_out``: it served no choice of the
    drafter's constants."""

    prompt: tuple[int, ...]
    epochs: tuple[list[Tokens], list[Tokens]]
    held_out: bool = False


def prompts_of(count: int) -> PromptSource:
    """Return the prompts of the long-answer task, of which an epoch has ``count``."""
    data = DataConfig("worked_arithmetic", rows=count, prompts_per_step=count)
    return PromptSource(data, make_tokenizer(), seed=0)


def long_answers(prompts: int, model: Transformer) -> list[Problem]:
    engine, source = engine_of(model, max_length=512, max_seqs=256), prompts_of(prompts)
    params = SamplingParams(max_tokens=256)
    said: dict[tuple[int, ...], list[list[Tokens]]] = {}
    for prompt in [*source.next(), *source.next()]:
        engine.submit([Request(f"{prompt.id}/{i}", prompt.ids, params, prompt.id) for i in range(GROUP)])
        outputs = {output.request_id: list(output.tokens) for output in engine.run()}
        said.setdefault(prompt.ids, []).append([outputs[f"{prompt.id}/{i}"] for i in range(GROUP)])
    return [Problem(ids, (first, second)) for ids, (first, second) in said.items()]


@lru_cache
def long_answer_model(target: str) -> Transformer:
    device: Any = PlainCpu(FREE_BYTES)
    with temporary_folder() as folder:
        path = str(make_base(folder / "base", "worked_arithmetic", target=target))
        model = Transformer(ModelConfig.from_hf(path), Mesh.single(), device)
        load_weights(model, path)
    return model


# ---- engines

TOGETHER = 4
"""Responses of a group that all engines together decode at a time"""


def engines(args: Arguments) -> Figures:
    groups = long_answers(args.prompts, long_answer_model(args.base))
    counts = ((1, False), (2, False), (2, True), (4, False), (4, True))
    cases = {
        f"{name}_{count}" + "_exchange" * shares: (count, shares, name)
        for name, (count, shares) in product(("siblings", "history", "both"), counts)
    }
    return rows_of(cases, lambda key: _measure(groups, *cases[key]))


def _measure(groups: Sequence[Problem], count: int, shares: bool, name: str) -> Figures:
    cluster = Cluster(count, shares, siblings=name != "history", history=name != "siblings")
    if name != "siblings":  # the first epoch: each group on one engine
        for number, said in enumerate(groups):
            waiting = [(f"0-{number}/{i}", text) for i, text in enumerate(said.epochs[0])]
            cluster.engines[number % count].waiting[number] = waiting
        cluster.run(0, GROUP)
        for engine in cluster.engines:
            engine.forwards = engine.tokens = 0
    for number, said in enumerate(groups):
        for i, text in enumerate(said.epochs[1]):
            # history: the whole group on the next engine; else divided
            engine = cluster.engines[(number + 1 if name == "history" else i) % count]
            engine.waiting.setdefault(number, []).append((f"1-{number}/{i}", text))
    cluster.run(1, GROUP if name == "history" else TOGETHER // count)
    tokens, forwards = (sum(getattr(engine, what) for engine in cluster.engines) for what in ("tokens", "forwards"))
    figures: Figures = {"tokens_per_forward": tokens / forwards}
    if shares:
        totals = [engine.drafter.exchange.totals for engine in cluster.engines if engine.drafter.exchange is not None]
        sent, received = sum(one.sent_tokens for one in totals), sum(one.received_tokens for one in totals)
        figures |= {
            "bytes_per_token": sum(one.sent_bytes for one in totals) / sent,
            "received_bytes_per_token": sum(one.received_bytes for one in totals) / max(1, received),
            "step_us": 1e6 * cluster.exchange_s / cluster.steps,
            "store_us": 1e6 * cluster.store_s / sent,
        }
    return figures


# ---- texts

END, BLOCK_SIZE, VOCABULARY = 0, 16, 8192


def texts(args: Arguments) -> Figures:
    problems, figures = list(_problems(args)), Figures()
    for name in ("tuned", "held_out"):
        half = [one for one in problems if one.held_out == (name == "held_out")]
        rows = rows_of(("siblings", "history", "both"), lambda source: drafted(half, source))  # noqa: B023
        figures[name] = {"problems": len(half)} | rows
    return figures


def _problems(args: Arguments) -> Iterator[Problem]:
    """Yield the problems of a file: of each the first half of its samples are said in the second epoch, as siblings,
    the others in the first."""
    rows = [json.loads(line) for line in Path(args.texts).read_text().splitlines()] if args.texts else _toy_rows()
    prompts = [str(row.get("prompt", row.get("question"))) for row in rows]
    encode = _encoder([*prompts, *(text for row in rows for text in row["samples"])])
    for prompt, row in zip(prompts, rows, strict=True):
        said = [[*encode(text), END] for text in row["samples"]]
        now, earlier = said[: len(said) // 2], said[len(said) // 2 :]
        digest = hashlib.blake2b(prompt.encode(), digest_size=1).digest()
        yield Problem(tuple(encode(prompt)), (earlier, now), held_out=bool(digest[0] % 2))


def _toy_rows() -> list[dict[str, Any]]:
    draw, words = random.Random(0), [f"word{i}" for i in range(12)]
    return [
        {"prompt": f"say {i}", "samples": [" ".join(draw.choices(words, k=12)) for _ in range(4)]} for i in range(8)
    ]


def _encoder(corpus: Sequence[str]) -> Callable[[str], Tokens]:
    """Return a function from text to ids: of a byte-level BPE that is made of the texts."""
    from tokenizers import ByteLevelBPETokenizer

    bpe: Any = ByteLevelBPETokenizer()
    bpe.train_from_iterator(corpus, VOCABULARY, min_frequency=0, show_progress=False, special_tokens=["<end>"])
    return lambda text: bpe.encode(text).ids


def drafted(problems: Sequence[Problem], source: str) -> Figures:
    """Decode all responses to one prompt side by side, prompt after prompt, with a new drafter; count the second
    epoch."""
    drafter: Any = TextDrafter.of(DraftsConfig(source=source))
    for epoch in (0, 1) if source != "siblings" else (1,):
        forwards, before = 0, sum(drafter.totals.drafted)
        for number, problem in enumerate(problems):
            forwards += _decoded(drafter, problem.prompt, f"e{epoch}-{number}", problem.epochs[epoch])
    tokens = sum(len(said) for problem in problems for said in problem.epochs[1])
    num_drafted = sum(drafter.totals.drafted) - before
    return {
        "tokens_per_forward": tokens / forwards,
        "drafted_per_forward": num_drafted / forwards,
        "accepted": (tokens - forwards) / max(1, num_drafted),
    }


def _decoded(drafter: TextDrafter, prompt: tuple[int, ...], group: str, texts_of_group: Sequence[Tokens]) -> int:
    """Decode responses side by side; return the forward passes of sequences."""
    params, forwards = SamplingParams(max_tokens=1 << 20, stop_token_ids=()), 0
    requests = (Request(f"{group}/{number}", prompt, params, group) for number in range(len(texts_of_group)))
    live = [(sequence.Sequence.of(one, params, ()), said) for one, said in zip(requests, texts_of_group, strict=True)]
    while live:
        left = [said[len(seq.tokens) - seq.first_token :] for seq, said in live]
        drafts = drafter.draft([seq for seq, _ in live], [len(one) - 1 for one in left], 1 << 20)
        for (seq, _), draft, next_tokens in zip(live, drafts, left, strict=True):
            kept = [0]
            if draft is not None:
                one = Verification.of(seq, draft, BLOCK_SIZE)
                kept = one.follow([next_tokens[depth] for depth in one.depths])
                drafter.observe([(one, kept)])
            seq.tokens += next_tokens[: len(kept)]
            forwards += 1
        for seq, said in live:
            if len(seq.tokens) - seq.first_token == len(said):
                drafter.end(seq)
        live = [(seq, said) for seq, said in live if len(seq.tokens) - seq.first_token < len(said)]
    return forwards


# ---- decoding

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
        rates_by_side = in_turns(sides, args.rounds, warm_ups=0)
        drafts, plain = ([max(column) for column in zip(*rates, strict=True)] for rates in rates_by_side.values())
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
