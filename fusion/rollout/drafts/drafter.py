"""Draft for the sequences of an engine, from the responses that it has seen to the same prompts.

    running sequences ─ read ─► texts of their prompts ─ index, look up ─► budget ─► drafts ─► engine
                                (`texts`)                                   ▲                    │
                                                                            └── kept, seconds ───┘

Every rank with the same schedule makes the same drafts, as they depend only on the calls."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from fusion.inference.config import DraftsConfig
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Draft, Verification
from fusion.rollout.drafts.budget import CARD, MAX_CHILDREN, MAX_DEPTH, MAX_TOKENS, DraftBudget, StepRows
from fusion.rollout.drafts.exchange import TextExchange
from fusion.rollout.drafts.pieces import decode
from fusion.rollout.drafts.suffix_index import HISTORY, PHRASES, SIBLING, Drafts, SuffixIndexes
from fusion.rollout.drafts.texts import DraftTotals, PromptTexts, TextSpec


class TextDrafter:
    """Implement `Drafter`. ``spec``: of the texts that are kept; None: the defaults; ``max_children``: tokens of a
    draft behind one; 1: drafts are single paths; ``max_depth``: tokens of a path, at most; ``budget``: how much of the
    drafts is verified; None: `DraftBudget`; ``clock``: seconds, for the totals."""

    def __init__(
        self,
        indexes: SuffixIndexes,
        *,
        spec: TextSpec | None = None,
        max_children: int = 1,
        max_depth: int = MAX_DEPTH,
        budget: DraftBudget | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_children, self._max_depth = max_children, max_depth
        self.budget = budget or DraftBudget()
        self.totals, self._clock = DraftTotals(), clock
        self.texts = PromptTexts(indexes, spec or TextSpec(), self.totals)
        self._drafted: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Sequence → shares and sources of the tokens of its draft that is being verified"""

    @classmethod
    def of(cls, config: DraftsConfig, rows: StepRows = CARD, *, single_paths: bool = False) -> "TextDrafter | None":
        """Create the drafter that a config asks for. ``single_paths``: the engine verifies no trees."""
        if not config.is_on:
            return None
        max_children = config.tree or (1 if single_paths else MAX_CHILDREN)
        spec = TextSpec.of(config)
        indexes, budget = SuffixIndexes(spec.phrase_bytes), DraftBudget(rows)
        return cls(indexes, spec=spec, max_children=max_children, budget=budget)

    @property
    def exchange(self) -> TextExchange | None:
        """With other engines, on the first rank of those with one schedule."""
        return self.texts.exchange

    @exchange.setter
    def exchange(self, exchange: TextExchange) -> None:
        self.texts.exchange = exchange

    def draft(self, sequences: Items[Sequence], max_depth: Items[int], max_tokens: int) -> list[Draft | None]:
        self._drafted.clear()  # a draft that found no room was not verified
        if self.budget.skips():
            return [None] * len(sequences)  # what is generated meanwhile is read at once later: that takes less time
        began_s = self._clock()
        drafts = self._draft(sequences, max_depth, max_tokens)
        self.totals.seconds += self._clock() - began_s
        return drafts

    def _draft(self, sequences: Items[Sequence], max_depth: Items[int], max_tokens: int) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(sequences)
        self.texts.drop_oldest()
        read = self.texts.read(sequences)
        if not read:
            return drafts
        places = self.texts.index([(sequences[i].request.id, prompt) for i, prompt in read])
        depths = [min(max_depth[i], self._max_depth) for i, _ in read]
        nodes = [min(depth * self._max_children, MAX_TOKENS) for depth in depths]
        acceptance, least = self.budget.by_share(), self.budget.min_probability(len(sequences))
        drawn = self.texts.indexes.draft(places, depths, nodes, acceptance, self._max_children, least)
        self.totals.asked += len(places)
        self.totals.found += int(np.count_nonzero(np.diff(drawn.offsets)))
        owners = np.repeat(np.arange(len(places)), np.diff(drawn.offsets))
        urgent = np.array([sequences[i].request.priority == 0 for i, _ in read])[owners]
        chosen = self.budget.choose(owners, drawn.probabilities, len(sequences), max_tokens=max_tokens, urgent=urgent)
        if chosen.any():
            for n, (i, _) in enumerate(read):
                drafts[i] = self._draft_of(sequences[i], drawn, chosen, n)
        return drafts

    def observe(self, verified: Items[tuple[Verification, Items[int]]]) -> None:
        """Record which rows of each verification were kept."""
        began_s = self._clock()
        drafted = [self._drafted.pop(id(one.seq)) for one, _ in verified]
        shares, sources = (np.concatenate(column) for column in zip(*drafted, strict=True))
        is_kept: list[bool] = []
        rows: list[int] = []
        parents: list[int] = []
        for one, kept in verified:
            start, of_draft = len(is_kept), set(kept)
            is_kept += [row in of_draft for row in range(len(one))]
            rows += [start + row for row in one.rows]
            parents += [start + one.parents[row] for row in one.rows]
        accepted, was_tried = np.array(is_kept)[rows], np.array(is_kept)[parents]
        self.budget.acceptance.observe(shares[was_tried], accepted[was_tried])
        self.totals.verified += len(verified)
        for source in (SIBLING, HISTORY, PHRASES):
            self.totals.drafted[source] += int(np.count_nonzero(sources == source))
            self.totals.accepted[source] += int(np.count_nonzero(accepted[sources == source]))
        self.totals.seconds += self._clock() - began_s

    def adopt(self, version: int) -> None:
        self.texts.adopt(version)
        self.texts.drop_oldest()  # text is kept, too, while nothing is drafted

    def drafts_update(self) -> bytes:
        if self.exchange is None:
            return b""
        keys = {prompt.key for prompt in self.texts.live.values() if prompt}
        return self.exchange.drafts_update(keys, self.texts.version)

    def flush(self) -> None:
        """Send the text that other engines do not know yet: this one stops."""
        if self.exchange is not None:
            self.exchange.flush(self.texts.version)

    def read(self, drafts_update: bytes) -> None:
        began_s = self._clock()
        _, pieces = decode(drafts_update)
        for piece in pieces:
            count = self.texts.read_piece(piece)
            self.totals.read += count
            self.totals.unread += len(piece.tokens) - count
        self.totals.seconds += self._clock() - began_s

    def end(self, seq: Sequence) -> None:
        """Read the last tokens of a sequence that leaves the engine."""
        began_s = self._clock()
        self.texts.end(seq)
        self.totals.seconds += self._clock() - began_s

    def _draft_of(self, seq: Sequence, drafts: Drafts, chosen: np.ndarray, n: int) -> Draft | None:
        rows = drafts.of(n)
        count = int(np.count_nonzero(chosen[rows]))  # of a draft, what comes first is chosen first
        if not count:
            return None
        rows = slice(rows.start, rows.start + count)
        self._drafted[id(seq)] = drafts.shares[rows], drafts.sources[rows]
        return Draft(drafts.tokens[rows].tolist(), drafts.parents[rows].tolist())
