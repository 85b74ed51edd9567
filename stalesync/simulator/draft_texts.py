"""Measure how many tokens drafts keep, by replaying recorded responses through the drafter of a run.

    rows of a file ─ tokens ─► responses to each prompt: the first half are a group, the others its last epoch
    epoch after epoch, a group decodes together, each pass with drafts for all ─► tokens a pass, by finished siblings

The drafter is that of the engines (`fusion/rollout/drafts`); that all of a draft is verified replaces its budget, as
what a budget leaves out depends on how many sequences a step has. What is kept of shorter drafts is the beginning of
what is kept of longer ones.

Invariant (property-tested): of a response every token is kept once; a pass keeps at least one."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusion.inference.request import Request, SamplingParams
from fusion.inference.sequence import Sequence as EngineSequence
from fusion.rollout.drafts.budget import DraftBudget
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.drafts.suffix_index import SuffixIndexes
from fusion.rollout.drafts.texts import TextSpec
from stalesync.simulator.drafts import MAX_DRAFTED, DraftSpec

Tokens = list[int]
TRACKS = 0, 1, 3, 7, 15
"""Finished siblings, at least, for which acceptance is measured apart"""
VOCABULARY = 8192
"""Size of the byte-level BPE that is trained on texts without a tokenizer"""


class WholeDrafts(DraftBudget):
    """Verify all of every draft."""

    def min_probability(self, num_sequences: int) -> float:
        return 0.0

    row_price = min_probability

    def skips(self) -> bool:
        return False


class KeptTokens:
    """Counts what forward passes keep, by track."""

    def __init__(self) -> None:
        self.passes = dict.fromkeys(TRACKS, 0)
        self.reached = {track: [0] * (MAX_DRAFTED + 1) for track in TRACKS}
        """Passes that kept at least so many drafted tokens"""

    def add(self, num_finished: int, accepted: int) -> None:
        track = max(track for track in TRACKS if track <= num_finished)
        self.passes[track] += 1
        for depth in range(accepted + 1):
            self.reached[track][depth] += 1

    def by_drafted(self) -> dict[int, list[float]]:
        """Return by track the mean tokens of a pass with drafts of at most 0, 1, … tokens. Tracks without passes are
        left out."""
        means = {}
        for track, passes in self.passes.items():
            if passes:
                shares = [count / passes for count in self.reached[track]]
                means[track] = [sum(shares[: drafted + 1]) for drafted in range(MAX_DRAFTED + 1)]
        return means


def measured(path: Path, *, siblings: bool, history: bool, tokenizer: Path | None = None) -> DraftSpec:
    """Return the drafts of a simulation whose acceptance is that of recorded responses. ``path``: JSON Lines: `prompt`,
    `question` or `group`, and `samples` (a list) or `response`, as in `samples.jsonl`; ``tokenizer``: folder with a
    `tokenizer.json`; None: a BPE is trained on the texts. Raise ValueError if the file cannot be read, or has no prompt
    with two responses; names the key."""
    kept, drafter = KeptTokens(), whole_drafter(TextSpec(siblings, history))
    groups = list(tokenized(read_texts(path), tokenizer))
    for number, (earlier, _) in enumerate(groups if history else ()):
        replay(drafter, f"0-{number}", number, earlier, KeptTokens())
    for number, (_, group) in enumerate(groups):
        replay(drafter, f"1-{number}", number, group, kept)
    return DraftSpec(siblings, history, kept=kept.by_drafted())


def whole_drafter(spec: TextSpec) -> TextDrafter:
    """Return a drafter of which all is verified, up to `MAX_DRAFTED` tokens of a sequence."""
    return TextDrafter(SuffixIndexes(spec.phrase_bytes), spec=spec, max_depth=MAX_DRAFTED, budget=WholeDrafts())


def replay(drafter: TextDrafter, name: str, prompt: int, texts: Sequence[Tokens], kept: KeptTokens) -> None:
    """Decode the responses of a group to a prompt, known by its number, together; count what each pass keeps."""
    params = SamplingParams(max_tokens=1 << 20, stop_token_ids=())
    requests = [Request(f"{name}/{i}", (prompt,), params, name) for i in range(len(texts))]
    running = [(EngineSequence.of(one, params, ()), text) for one, text in zip(requests, texts, strict=True)]
    while running:
        done = [len(seq.tokens) - seq.first_token for seq, _ in running]
        left = [len(text) - at - 1 for (_, text), at in zip(running, done, strict=True)]
        drafts = drafter.draft([seq for seq, _ in running], left, 1 << 30)
        num_finished = len(texts) - len(running)
        for (seq, text), at, draft in zip(running, done, drafts, strict=True):
            node = accepted = 0
            for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True) if draft else ()):
                if parent == node - 1 and token == text[at + accepted]:
                    node, accepted = child + 1, accepted + 1
            kept.add(num_finished, accepted)
            seq.tokens += text[at : at + accepted + 1]
        ended = [pair for pair in running if len(pair[0].tokens) - pair[0].first_token == len(pair[1])]
        running = [pair for pair in running if pair not in ended]
        for seq, _ in ended:
            drafter.end(seq)


def read_texts(path: Path) -> list[list[str]]:
    """Return the responses of every prompt that has two, in the order of the file; raise ValueError as `measured`."""
    by_prompt: dict[str, list[str]] = {}
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "abridged" in row:
                raise ValueError("a response is abridged; expected a run with run.sample_characters=null")
            prompt = next(str(row[key]) for key in ("group", "prompt", "question") if key in row)
            by_prompt.setdefault(prompt, []).extend(row["samples"] if "samples" in row else [row["response"]])
    except (OSError, ValueError, TypeError, KeyError, StopIteration) as error:
        raise ValueError(f"texts={path}: expected JSON Lines with prompt and response, or samples: {error}") from None
    groups = [responses for responses in by_prompt.values() if len(responses) > 1]
    if not groups:
        raise ValueError(f"texts={path}: no prompt has two responses")
    return groups


def tokenized(groups: Sequence[Sequence[str]], folder: Path | None) -> Iterator[tuple[list[Tokens], list[Tokens]]]:
    """Yield the earlier responses of every prompt and those of its group, as tokens; empty ones are left out."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    if folder is None:
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator((text for group in groups for text in group), VOCABULARY, show_progress=False)
    else:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for group in groups:
        texts = [one.ids for one in tokenizer.encode_batch(list(group)) if one.ids]
        half = -(-len(texts) // 2)
        yield texts[half:], texts[:half]
