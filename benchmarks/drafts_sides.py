"""Run the parts of `benchmarks/drafts.py`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.engine_sides import PlainCpu
from benchmarks.rotation import in_rotation
from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams, sequence
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.rollout.drafts.budget import DraftBudget
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.native import NativeIndexes
from fusion.rollout.drafts.suffix_index import HISTORY, SIBLING
from fusion.rollout.drafts.texts import MAX_MATCH, MIN_MATCH
from fusion.rollout.drafts.window import WindowBudget

ROOT = Path(__file__).resolve().parent.parent
GROUP, DEPTH, EARLIER = 16, 8, 8
RIGHT_WEIGHT = 4
"""Of a response in the history that has earned a reward, where weighted by it"""
SHARES = (np.arange(16) + 0.5) / 16
"""Acceptance by share, where none is measured"""
Figures = dict[str, Any]
Tokens = list[int]


class HostMemory(PlainCpu):
    def memory(self) -> Any:
        return SimpleNamespace(free=3 << 30)


# ---- server


def server(args: argparse.Namespace) -> Figures:
    """Index 16 responses of 4,000 tokens that differ in a tenth of them, then draft for 64 sequences at a time."""
    draw = np.random.default_rng(0)
    base = draw.integers(0, 5000, 4000)

    def varied() -> Tokens:
        text, changed = base.copy(), draw.random(4000) < 0.1
        text[changed] = draw.integers(0, 5000, int(changed.sum()))
        return text.tolist()

    texts = [varied() for _ in range(GROUP)]
    measured = [_measure_index(texts, [varied()[: 50 + i] for i in range(64)]) for _ in range(5)]
    insert_us, draft_us, nbytes = (min(column) for column in zip(*measured, strict=True))
    figures = {"insert_us": insert_us, "draft_us": draft_us, "bytes_per_token": nbytes}
    sizes = f"draft of {DEPTH} {draft_us:.2f} us, {nbytes:.0f} bytes a token"
    print(f"server: insert {insert_us:.2f} us a token, {sizes}")
    return figures


def _measure_index(texts: list[Tokens], live: list[Tokens]) -> tuple[float, float, float]:
    """Return microseconds to index a token of the texts, and to draft for a sequence of ``live``; bytes a token."""
    indexes = NativeIndexes()
    index, tokens = indexes.new([], MIN_MATCH, MAX_MATCH), sum(map(len, texts))
    places = [(index, indexes.open(index, SIBLING)) for _ in texts]
    insert_us = _cpu_us(lambda: indexes.extend(places, texts)) / tokens
    nbytes = indexes.nbytes / tokens
    running = [(index, indexes.open(index, SIBLING)) for _ in live]
    indexes.extend(running, live)
    depths = [DEPTH] * len(live)
    draft_us = min(_cpu_us(lambda: indexes.draft(running, depths, depths, SHARES)) for _ in range(20)) / len(live)
    return insert_us, draft_us, nbytes


def _cpu_us(work: Callable[[], Any]) -> float:
    start_s = time.process_time()
    work()
    return (time.process_time() - start_s) * 1e6


# ---- text


def text(args: argparse.Namespace) -> Figures:
    """Replay the responses of two epochs in several orders."""
    groups = texts_of_two_epochs(args)
    size = max(len(group.texts) for group in groups)
    together = [list(range(size))]
    one_first = [[0], list(range(1, size))]
    four = [list(range(i, i + 4)) for i in range(0, size, 4)]
    modes: dict[str, tuple[list[list[int]], bool, int, int]] = {
        "none": (together, False, 0, 1),
        "siblings": (together, True, 0, 1),
        "probe": (one_first, True, 0, 1),
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
        found = [_replay(group, order, siblings, right_weight, children) for group in groups]
        forwards, tokens, drafted, hits = (sum(column) for column in zip(*found, strict=True))
        figures[name] = {
            "tokens_per_forward": tokens / forwards,
            "accepted": (tokens - forwards) / max(1, drafted),
            "hit_rate": hits / forwards,
        }
        shares = f"{figures[name]['accepted']:4.0%} of drafted tokens, a draft for {figures[name]['hit_rate']:4.0%}"
        print(f"text, {name:17} {tokens / forwards:5.2f} tokens a forward, {shares}")
    return figures


@dataclass(frozen=True)
class Said:
    """Of one prompt: ``texts``: what a group says in the second epoch; ``history``: in the first; ``right``: which of
    the latter earn a reward."""

    texts: list[Tokens]
    history: list[Tokens]
    right: list[bool]


def texts_of_two_epochs(args: argparse.Namespace) -> list[Said]:
    """Return what was said to every prompt; generated once."""
    if not _groups:
        _groups.extend(_groups_of_file(args.texts, args.tokenizer) if args.texts else _generated(args))
    return _groups


_groups: list[Said] = []


def _replay(
    said: Said, order: list[list[int]], siblings: bool, right_weight: int, children: int
) -> tuple[int, int, int, int]:
    """Generate responses in turns of some at a time, each pass with a draft of up to `DEPTH` tokens (a tree of twice as
    many). ``right_weight``: of history that has earned a reward, where other history counts 1; 0: history is not used.
    Return forward passes of sequences, tokens, drafted tokens, and sequences with a draft."""
    indexes, texts = NativeIndexes(), said.texts
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
                drafts = indexes.draft(
                    [places[i] for i in live], wanted, [min(nodes, w * children) for w in wanted], SHARES, children
                )
            for n, i in enumerate(live):
                kept = 1
                if drafts_any:
                    rows = drafts.of(n)
                    drafted += rows.stop - rows.start
                    hits += rows.stop > rows.start
                    kept += _accepted(drafts.tokens[rows], drafts.parents[rows], texts[i][done[i] :])
                indexes.extend([places[i]], [texts[i][done[i] : done[i] + kept]])
                done[i] += kept
                tokens += kept
                forwards += 1
    return forwards, tokens, drafted, hits


def _accepted(tokens: np.ndarray, parents: np.ndarray, said: Tokens) -> int:
    node, depth = -1, 0
    for child in range(len(tokens)):
        if parents[child] == node and depth < len(said) and tokens[child] == said[depth]:
            node, depth = child, depth + 1
    return depth


def _generated(args: argparse.Namespace) -> Iterator[Said]:
    from fusion.rewards.arithmetic import arithmetic
    from stalesync.prompts import DataConfig, PromptSource, make_tokenizer

    loaded = long_answer_model(args)
    config = RolloutConfig(max_length=512, max_seqs=256)
    engine = EmbeddedEngine(loaded, loaded.mesh, HostMemory(), config=config)
    engine.allocate_kv()
    data = DataConfig(source="worked_arithmetic", rows=args.prompts, prompts_per_step=args.prompts)
    tokenizer = make_tokenizer()
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


def long_answer_model(args: argparse.Namespace) -> Transformer:
    """Load the base model of the long-answer task; make it, unless there is one."""
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder, "base")
        if args.model is None:
            command = [sys.executable, "scripts/make_base.py", "worked_arithmetic", str(model)]
            subprocess.run(command, cwd=ROOT, check=True)
        loaded = Transformer(ModelConfig.from_hf(str(model)), Mesh.single(), HostMemory())
        load_weights(loaded, str(model))
    return loaded


def _groups_of_file(path: Path, tokenizer: Path) -> Iterator[Said]:
    """Yield the groups of a file, which have no history."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    groups: dict[str, list[Tokens]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault(str(row["group"]), []).append(encode(row["response"])["input_ids"])
    for texts in groups.values():
        yield Said(texts, [], [])


# ---- real


def real(args: argparse.Namespace) -> Figures:
    """Decode with drafts and without, in turns."""
    model = _model()
    figures: Figures = {}
    for live in (1, 2, 4, 8, 32):
        sides: dict[str, list[float]] = {"drafts": [], "plain": [], "window": []}
        accepted: list[float] = []
        for round_ in range(args.rounds):
            for side in in_rotation(list(sides), round_):
                budget = {"drafts": DraftBudget, "window": WindowBudget}.get(side)
                rate, per_forward = _decode(model, live, budget and budget(), seed=round_)
                sides[side].append(rate)
                if side == "drafts":
                    accepted.append(per_forward)
        ratio = statistics.median(sides["drafts"]) / statistics.median(sides["plain"])
        window = statistics.median(sides["window"]) / statistics.median(sides["plain"])
        figures[str(live)] = {"ratio": ratio, "accepted": statistics.median(accepted), "window_ratio": window}
        per_forward = f"{figures[str(live)]['accepted']:.2f} tokens a forward"
        print(f"real, {live:3} live: {ratio:.2f} x, {per_forward}; {window:.2f} x with rollout.draft_budget=window")
    return figures


def _model() -> Transformer:
    config = ModelConfig.from_hf(
        dict(
            model_type="qwen3_moe",
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=448,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            eos_token_id=1,
        )
    )
    model = Transformer(config, Mesh.single(), HostMemory())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.03 if parameter.dim() > 1 else torch.ones(1)
            parameter.copy_(values.expand(parameter.shape))
    return model


def _decode(model: Transformer, live: int, budget: DraftBudget | WindowBudget | None, seed: int) -> tuple[float, float]:
    """Return tokens a CPU second of ``live`` sequences, and tokens of a sequence a forward pass. With a budget there
    are drafts, and `EARLIER` responses to each prompt are known, which differ in a tenth of the tokens."""
    prompts = [tuple(random.Random(i).randrange(2, 4096) for _ in range(256)) for i in range(live)]
    params = SamplingParams(max_tokens=128, stop_token_ids=())
    requests = [Request(f"r{seed}-{i}", prompt, params, f"g{seed}-{i}") for i, prompt in enumerate(prompts)]
    known = _said(model, requests) if budget else {}
    drafter = TextDrafter(NativeIndexes(), budget=budget) if budget else None
    config = RolloutConfig(max_length=512, max_seqs=live, max_batch_tokens=8192)
    engine = EmbeddedEngine(model, model.mesh, HostMemory(), config=config, drafter=drafter)
    engine.allocate_kv()
    draw = random.Random(seed)
    for request in requests if drafter is not None else ():
        earlier = [
            sequence.Sequence.of(Request(f"e{i}", request.prompt, params, "e"), params, ()) for i in range(EARLIER)
        ]
        for one in earlier:
            one.tokens += [draw.randrange(2, 4096) if draw.random() < 0.1 else token for token in known[request.id]]
            drafter.draft([one], [0], 0)
        for one in earlier:
            drafter.end(one)
    engine.submit(requests)
    engine.step()
    before, start_s = engine.scheduler.counters.generated_tokens, time.thread_time()
    while engine.scheduler.unfinished:
        engine.step()
    rate = (engine.scheduler.counters.generated_tokens - before) / (time.thread_time() - start_s)
    status = engine.status()
    return rate, 1 + status["accepted_tokens"] / max(1.0, status["decoded_sequences"])


_known: dict[str, Tokens] = {}


def _said(model: Transformer, requests: list[Request]) -> dict[str, Tokens]:
    """Return what each request says: the same with drafts and without."""
    if missing := [request for request in requests if request.id not in _known]:
        engine = EmbeddedEngine(model, model.mesh, HostMemory(), config=RolloutConfig(max_length=512, max_seqs=64))
        engine.allocate_kv()
        engine.submit(missing)
        _known.update({output.request_id: list(output.tokens) for output in engine.run()})
    return {request.id: _known[request.id] for request in requests}
