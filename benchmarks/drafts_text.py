"""Run the parts of `benchmarks/drafts.py` in which no model decodes: the index, and responses replayed."""

from __future__ import annotations

import hashlib
import json
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figures, progress, timed
from benchmarks.models import PlainCpu, engine_of
from benchmarks.runs import make_base, temporary_folder
from fusion.inference import Request, SamplingParams, sequence
from fusion.inference.config import DraftsConfig
from fusion.inference.verification import Verification
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.rollout.drafts.budget import SHARES
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING, SuffixIndexes
from fusion.rollout.drafts.texts import MAX_MATCH, MIN_MATCH
from tests.rollout.drafts.modelled_engines import DEPTH, Cluster, Tokens, accepted

GROUP = 16
RIGHT_WEIGHT = 4
"""Of a response in the history that has earned a reward, where weighted by it"""
FREE_BYTES = 3 << 30


def server(args: Namespace) -> Figures:
    """Index 16 responses that differ in a tenth of their tokens, then draft for 64 sequences at a time."""
    draw, size = np.random.default_rng(0), args.index_tokens
    base = draw.integers(0, 5000, size)

    def varied() -> Tokens:
        return np.where(draw.random(size) < 0.1, draw.integers(0, 5000, size), base).tolist()

    texts = [varied() for _ in range(GROUP)]
    measured = [_measure_index(texts, [varied()[: 50 + i] for i in range(64)]) for _ in range(5)]
    return {name: min(one[name] for one in measured) for name in measured[0]}


def _measure_index(texts: list[Tokens], live: list[Tokens]) -> Figures:
    indexes = SuffixIndexes()
    index, tokens = indexes.new([], MIN_MATCH, MAX_MATCH), sum(map(len, texts))
    places, running = ([(index, indexes.open(index, SIBLING)) for _ in said] for said in (texts, live))
    insert_s, nbytes = timed(lambda: indexes.extend(places, texts), time.process_time), indexes.nbytes
    indexes.extend(running, live)
    depths = [DEPTH] * len(live)
    draft_s = min(timed(lambda: indexes.draft(running, depths, depths, SHARES), time.process_time) for _ in range(20))
    us = {"insert_us": 1e6 * insert_s / tokens, "draft_us": 1e6 * draft_s / len(live)}
    return us | {"bytes_per_token": nbytes / tokens}


@dataclass(frozen=True)
class Said:
    """Of one prompt: ``texts``: what a group says in the second epoch; ``history``: in the first; ``right``: which of
    the latter earn a reward."""

    texts: list[Tokens]
    history: list[Tokens]
    right: list[bool]


@lru_cache
def texts_of_two_epochs(prompts: int, model: Transformer) -> list[Said]:
    """Return what the long-answer model says to every prompt."""
    from fusion.rewards.arithmetic import arithmetic
    from stalesync.prompts import DataConfig, PromptSource, make_tokenizer

    engine, tokenizer = engine_of(model, max_length=512, max_seqs=256), make_tokenizer()
    source = PromptSource(DataConfig("worked_arithmetic", rows=prompts, prompts_per_step=prompts), tokenizer, seed=0)
    said: dict[tuple[int, ...], list[list[Tokens]]] = {}
    answers: dict[tuple[int, ...], str] = {}
    for prompt in [*source.next(), *source.next()]:
        params = SamplingParams(max_tokens=256)
        engine.submit([Request(f"{prompt.id}/{i}", prompt.ids, params, prompt.id) for i in range(GROUP)])
        outputs = {output.request_id: list(output.tokens) for output in engine.run()}
        said.setdefault(prompt.ids, []).append([outputs[f"{prompt.id}/{i}"] for i in range(GROUP)])
        answers[prompt.ids] = prompt.answer
    return [
        Said(second, first, [arithmetic("", one, answers[ids]) > 0 for one in _decoded_texts(tokenizer, first)])
        for ids, (first, second) in said.items()
    ]


def _decoded_texts(tokenizer: Any, texts: list[Tokens]) -> list[str]:
    return [tokenizer.decode(text, skip_special_tokens=True) for text in texts]


def base_model(folder: str | None, target: str, made: Path) -> Path:
    """Return the folder of the base model of the long-answer task; make it, unless there is one."""
    options = ["--target", target] if target else []
    return Path(folder) if folder else make_base(made / "base", "worked_arithmetic", *options)


@lru_cache
def long_answer_model(folder: str | None, target: str) -> Transformer:
    """Load the base model of the long-answer task from its folder, or make it."""
    device: Any = PlainCpu(FREE_BYTES)
    with temporary_folder() as made:
        path = str(base_model(folder, target, made))
        model = Transformer(ModelConfig.from_hf(path), Mesh.single(), device)
        load_weights(model, path)
    return model


def text(args: Namespace) -> Figures:
    """Replay the responses of two epochs in several orders."""
    groups = texts_of_two_epochs(args.prompts, long_answer_model(args.model, args.base))
    together, rest = [list(range(GROUP))], list(range(1, GROUP))
    four = [list(range(i, i + 4)) for i in range(0, GROUP, 4)]
    modes: dict[str, tuple[list[list[int]], bool, int, int]] = {
        "none": (together, False, 0, 1),
        "siblings": (together, True, 0, 1),
        "probe": ([[0], rest], True, 0, 1),
        "four": (four, True, 0, 1),
        "history": (together, False, 1, 1),
        "history_by_reward": (together, False, RIGHT_WEIGHT, 1),
        "both": (together, True, 1, 1),
        "both_tree": (together, True, 1, 4),
    }
    figures: Figures = {}
    for name, (order, siblings, right_weight, children) in modes.items():
        found = [replayed(group, order, siblings, right_weight, children) for group in groups]
        forwards, tokens, drafted, hits = (sum(column) for column in zip(*found, strict=True))
        figures[name] = {
            "tokens_per_forward": tokens / forwards,
            "accepted": (tokens - forwards) / max(1, drafted),
            "hit_rate": hits / forwards,
        }
    return figures


def replayed(
    said: Said, order: list[list[int]], siblings: bool, right_weight: int, children: int
) -> tuple[int, int, int, int]:
    """Generate responses in turns of some at a time, each pass with a draft of up to `DEPTH` tokens (a tree of twice as
    many). ``right_weight``: of history that has earned a reward, where other history counts 1; 0: history is not used.
    Return forward passes of sequences, tokens, drafted tokens, and sequences with a draft."""
    indexes, texts = SuffixIndexes(), said.texts
    index = indexes.new([], MIN_MATCH, MAX_MATCH)
    if right_weight:
        weights = [right_weight if right else 1 for right in said.right]
        indexes.extend([(index, indexes.open(index, HISTORY, weight)) for weight in weights], said.history)
    drafts_any = siblings or right_weight > 0
    forwards = tokens = drafted = hits = 0
    nodes = DEPTH if children == 1 else 2 * DEPTH
    for members in order:
        places = {i: (index, indexes.open(index, SIBLING, 1 if siblings else 0)) for i in members}
        done = dict.fromkeys(places, 0)
        while live := [i for i in places if done[i] < len(texts[i])]:
            wanted = [min(DEPTH, len(texts[i]) - done[i] - 1) for i in live]
            if drafts_any:
                sizes = [min(nodes, w * children) for w in wanted]
                drafts = indexes.draft([places[i] for i in live], wanted, sizes, SHARES, children)
            for n, i in enumerate(live):
                kept = 1
                if drafts_any:
                    rows = drafts.of(n)
                    drafted += rows.stop - rows.start
                    hits += rows.stop > rows.start
                    kept += accepted(drafts.tokens[rows], drafts.parents[rows], texts[i][done[i] :])
                indexes.extend([places[i]], [texts[i][done[i] : done[i] + kept]])
                done[i] += kept
                tokens += kept
                forwards += 1
    return forwards, tokens, drafted, hits


# ---- engines

TOGETHER = 4
"""Responses of a group that all engines together decode at a time"""


def engines(args: Namespace) -> Figures:
    """Replay the responses of the second epoch on 1, 2 and 4 engines, with the exchange of text and without."""
    groups = texts_of_two_epochs(args.prompts, long_answer_model(args.model, args.base))
    figures: Figures = {}
    counts = ((1, False), (2, False), (2, True), (4, False), (4, True))
    for name, (count, shares) in product(("siblings", "history", "both"), counts):
        key = f"{name}_{count}" + "_exchange" * shares
        figures[key] = _measure(groups, count, shares, name)
        progress(key, figures[key])
    return figures


def _measure(groups: Sequence[Said], count: int, shares: bool, name: str) -> Figures:
    cluster = Cluster(count, shares, siblings=name != "history", history=name != "siblings")
    if name != "siblings":  # the first epoch: each group on one engine
        for number, said in enumerate(groups):
            waiting = [(f"0-{number}/{i}", text) for i, text in enumerate(said.history)]
            cluster.engines[number % count].waiting[number] = waiting
        cluster.run(0, GROUP)
        for engine in cluster.engines:
            engine.forwards = engine.tokens = 0
    for number, said in enumerate(groups):
        for i, text in enumerate(said.texts):
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


@dataclass(frozen=True)
class Problem:
    """``epochs``: what its group says in the first epoch and in the second; ``held_out``: it served no choice of the
    drafter's constants."""

    prompt: tuple[int, ...]
    epochs: tuple[list[Tokens], list[Tokens]]
    held_out: bool


def texts(args: Namespace) -> Figures:
    """Replay the second epoch of each half of the problems: from siblings, from history of the first, and from both."""
    problems, figures = list(_problems(args)), Figures()
    for name in ("tuned", "held_out"):
        half = [one for one in problems if one.held_out == (name == "held_out")]
        figures[name] = {"problems": len(half)} | {
            source: drafted(half, source) for source in ("siblings", "history", "both")
        }
        progress(name, {source: figures[name][source]["tokens_per_forward"] for source in ("siblings", "both")})
    return figures


def is_held_out(prompt: str) -> bool:
    """Divide problems evenly, whatever else the file has."""
    return bool(hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] % 2)


def _problems(args: Namespace) -> Iterator[Problem]:
    """Yield the problems of a file: of each the first half of its samples are said in the second epoch, as siblings,
    the others in the first."""
    rows = [json.loads(line) for line in Path(args.texts).read_text().splitlines()] if args.texts else _toy_rows()
    prompts = [str(row.get("prompt", row.get("question"))) for row in rows]
    encode = _encoder(args.tokenizer, [*prompts, *(text for row in rows for text in row["samples"])])
    for prompt, row in zip(prompts, rows, strict=True):
        said = [[*encode(text), END] for text in row["samples"]]
        now, earlier = said[: len(said) // 2], said[len(said) // 2 :]
        yield Problem(tuple(encode(prompt)), (earlier, now), is_held_out(prompt))


def _toy_rows() -> list[dict[str, Any]]:
    draw, words = random.Random(0), [f"word{i}" for i in range(12)]
    return [
        {"prompt": f"say {i}", "samples": [" ".join(draw.choices(words, k=12)) for _ in range(4)]} for i in range(8)
    ]


def _encoder(folder: str | None, corpus: Sequence[str]) -> Callable[[str], Tokens]:
    """Return a function from text to ids: of a tokenizer's folder, else a byte-level BPE that is made of the texts."""
    if folder:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe, bytes_ = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = bytes_(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=bytes_.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    return lambda text: bpe.encode(text).ids


def drafted(problems: Sequence[Problem], source: str) -> Figures:
    """Decode all responses to one prompt side by side, prompt after prompt, with a drafter that knows nothing at
    first; count the second epoch."""
    drafter = TextDrafter.of(DraftsConfig(source=source))
    assert drafter is not None
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
    live = []
    for number, said in enumerate(texts_of_group):
        request = Request(f"{group}/{number}", prompt, params, group)
        live.append((sequence.Sequence.of(request, params, ()), said))
    while live:
        left = [said[len(seq.tokens) - seq.first_token :] for seq, said in live]
        drafts = drafter.draft([seq for seq, _ in live], [len(one) - 1 for one in left], 1 << 20)
        for (seq, _), draft, next_tokens in zip(live, drafts, left, strict=True):
            kept = [0]
            if draft is not None:
                one = Verification.of(seq, draft, BLOCK_SIZE)
                kept = one.follow([next_tokens[depth] for depth in one.depths])
                drafter.observe(one, kept)
            seq.tokens += next_tokens[: len(kept)]
            forwards += 1
        for seq, said in live:
            if len(seq.tokens) - seq.first_token == len(said):
                drafter.end(seq)
        live = [(seq, said) for seq, said in live if len(seq.tokens) - seq.first_token < len(said)]
    return forwards
