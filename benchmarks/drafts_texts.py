"""Run the part `texts` of `benchmarks/drafts.py`: recorded model texts replayed through the drafter, which learns from
what is accepted as in a run."""

from __future__ import annotations

import hashlib
import json
import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Figures, progress
from fusion.inference import Request, SamplingParams, sequence
from fusion.inference.config import DraftsConfig
from fusion.inference.verification import Verification
from fusion.rollout.drafts.drafter import TextDrafter

Tokens = list[int]

END, BLOCK_SIZE, VOCABULARY = 0, 16, 8192
SPLITS = "tuned", "held_out"


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
    for name in SPLITS:
        half = [one for one in problems if one.held_out == (name == "held_out")]
        figures[name] = {"problems": len(half)} | {
            source: replayed(half, source) for source in ("siblings", "history", "both")
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


def _encoder(folder: str | None, corpus: Sequence[str]) -> Any:
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


def replayed(problems: Sequence[Problem], source: str) -> Figures:
    """Decode all responses to one prompt side by side, prompt after prompt, with a drafter that knows nothing at
    first; count the second epoch."""
    drafter = TextDrafter.of(DraftsConfig(source=source))
    assert drafter is not None
    for epoch in (0, 1) if source != "siblings" else (1,):
        forwards, drafted = 0, sum(drafter.totals.drafted)
        for number, problem in enumerate(problems):
            forwards += _decoded(drafter, problem.prompt, f"e{epoch}-{number}", problem.epochs[epoch])
    tokens = sum(len(said) for problem in problems for said in problem.epochs[1])
    drafted = sum(drafter.totals.drafted) - drafted
    return {
        "tokens_per_forward": tokens / forwards,
        "drafted_per_forward": drafted / forwards,
        "accepted": (tokens - forwards) / max(1, drafted),
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
