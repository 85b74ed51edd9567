"""Run the parts `server`, `text` and `engines` of `benchmarks/drafts.py`: the index, and responses replayed."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figures, progress, timed
from benchmarks.models import PlainCpu
from benchmarks.runs import make_base, temporary_folder
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.rollout.drafts.budget import SHARES
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING, SuffixIndexes
from fusion.rollout.drafts.texts import MAX_MATCH, MIN_MATCH
from tests.rollout.drafts.modelled_engines import DEPTH, Cluster, Tokens, accepted
from tests.rollouts import rollout_config

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
    places = [(index, indexes.open(index, SIBLING)) for _ in texts]
    insert_s, nbytes = timed(lambda: indexes.extend(places, texts), time.process_time), indexes.nbytes
    running = [(index, indexes.open(index, SIBLING)) for _ in live]
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


_groups: list[Said] = []


def texts_of_two_epochs(args: Namespace) -> list[Said]:
    """Return what was said to every prompt; generated once."""
    if not _groups:
        _groups.extend(_groups_of_file(args.texts, args.tokenizer) if args.texts else _generated(args))
    return _groups


def _groups_of_file(path: str, tokenizer: str) -> Iterator[Said]:
    """Yield the groups of a file, which have no history."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    groups: dict[str, list[Tokens]] = {}
    for row in map(json.loads, Path(path).read_text().splitlines()):
        groups.setdefault(str(row["group"]), []).append(encode(row["response"])["input_ids"])
    for texts in groups.values():
        yield Said(texts, [], [])


def _generated(args: Namespace) -> Iterator[Said]:
    from fusion.rewards.arithmetic import arithmetic
    from stalesync.prompts import DataConfig, PromptSource, make_tokenizer

    engine = make_engine(long_answer_model(args), max_length=512, max_seqs=256)
    data, tokenizer = (
        DataConfig("worked_arithmetic", rows=args.prompts, prompts_per_step=args.prompts),
        make_tokenizer(),
    )
    source = PromptSource(data, tokenizer, seed=0)
    said: dict[tuple[int, ...], list[list[Tokens]]] = {}
    answers: dict[tuple[int, ...], str] = {}
    for prompt in [*source.next(), *source.next()]:
        params = SamplingParams(max_tokens=256)
        engine.submit([Request(f"{prompt.id}/{i}", prompt.ids, params, prompt.id) for i in range(GROUP)])
        outputs = {output.request_id: list(output.tokens) for output in engine.run()}
        said.setdefault(prompt.ids, []).append([outputs[f"{prompt.id}/{i}"] for i in range(GROUP)])
        answers[prompt.ids] = prompt.answer
    for ids, (first, second) in said.items():
        responses = [tokenizer.decode(text, skip_special_tokens=True) for text in first]
        yield Said(second, first, [arithmetic("", response, answers[ids]) > 0 for response in responses])


def base_model(args: Namespace, folder: Path) -> Path:
    """Return the folder of the base model of the long-answer task; make it, unless there is one."""
    target = ["--target", args.base] if args.base else []
    return Path(args.model) if args.model else make_base(folder / "base", "worked_arithmetic", *target)


def long_answer_model(args: Namespace) -> Transformer:
    """Load the base model of the long-answer task."""
    device: Any = PlainCpu(FREE_BYTES)
    with temporary_folder() as folder:
        path = str(base_model(args, folder))
        model = Transformer(ModelConfig.from_hf(path), Mesh.single(), device)
        load_weights(model, path)
    return model


def make_engine(model: Transformer, drafter: Any = None, **config: Any) -> EmbeddedEngine:
    device: Any = PlainCpu(FREE_BYTES)
    engine = EmbeddedEngine(model, model.mesh, device, config=rollout_config(**config), drafter=drafter)
    engine.allocate_kv()
    return engine


def text(args: Namespace) -> Figures:
    """Replay the responses of two epochs in several orders."""
    groups = texts_of_two_epochs(args)
    size = max(len(group.texts) for group in groups)
    together = [list(range(size))]
    four = [list(range(i, i + 4)) for i in range(0, size, 4)]
    modes: dict[str, tuple[list[list[int]], bool, int, int]] = {
        "none": (together, False, 0, 1),
        "siblings": (together, True, 0, 1),
        "probe": ([[0], list(range(1, size))], True, 0, 1),
        "four": (four, True, 0, 1),
        "history": (together, False, 1, 1),
        "history_by_reward": (together, False, RIGHT_WEIGHT, 1),
        "both": (together, True, 1, 1),
        "both_tree": (together, True, 1, 4),
    }
    figures: Figures = {}
    for name, (order, siblings, right_weight, children) in modes.items():
        if right_weight and not groups[0].history:
            continue
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
        places = {i: (index, indexes.open(index, SIBLING, 1 if siblings else 0)) for i in members if i < len(texts)}
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
    groups = texts_of_two_epochs(args)
    figures: Figures = {}
    for name in ("siblings", "history", "both"):
        for count, shares in ((1, False), (2, False), (2, True), (4, False), (4, True)):
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
