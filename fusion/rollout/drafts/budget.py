"""Decide how much of the drafts of a step is verified, from how often drafted tokens were right. Pure.

    acceptance        share of a token in the text ──► how often such a token was right               (counted)
    min_probability   sequences of a step ──► how probable a token must be to be worth a row
    choose            of those that are, the most probable tokens of drafts that pay, as many as have room; those of
                      probes, which siblings draft from, and of requests that have come back (the tail) come first

The marginal-benefit rule of Seer (arXiv 2511.14617, section 3.4): a row more is worth its time if it promises more
tokens a second than the step has without. What is fixed in a step takes as long as some rows (`StepRows`), so with n
sequences a row costs n / (n + fixed) tokens: little where few sequences run, nearly one on a busy card. To look for
drafts and to plan them has to pay, too. How long a text must agree, how far and how widely is drafted follow from it,
as the probability falls along a path: far where text repeats, not at all where drafts turn out wrong. Nothing depends
on a clock: the same calls have the same drafts.

Invariants (property-tested): what `choose` takes are the first tokens in its order, at most `max_tokens`, and none
without the one before it; a step with them promises more tokens a second than without; whatever was right or wrong, at
least one of `LOOK_EVERY` steps (`BUSY_LOOK_EVERY`) looks for drafts, and one of `EXPLORE_EVERY` that look verifies some
as if nothing were known."""

import numpy as np

StepRows = tuple[int, float, float]
"""Rows that take as long as what is fixed in a step; as to plan and keep a sequence's draft; as to look one up"""
CARD: StepRows = (256, 0.0, 0.0)
"""To read weights: FLOP/s over bytes/s of a card, 200 to 300; drafts are nothing beside it"""
HOST: StepRows = (32, 1.0, 0.4)
"""One core, measured: 16 ms and 0.75 ms a row of a 52M MoE, 0.45 ms and 10 us of the smallest models. Of these a draft
takes about 10 us to plan and 4 us to look up, estimated from profiles."""
MIN_PROBABILITY = 0.06
"""Minimum for a token where few sequences run: each row of a MoE reads weights of its own"""
URGENT_WEIGHT = 2.0
"""How many times as probable a token of a probe, or of a request that has come back, counts in the order of tokens"""
MIN_GAIN = 0.1
"""Tokens a sequence that the drafts of a step must promise together: less is not worth the time to look them up"""
LOOK_EVERY = 8
"""While nothing is found that is worth its time, drafts are looked up after 1, 2 and 4 steps, then every this many: to
look for them costs time, too"""
BUSY_LOOK_EVERY = 16
"""The same where a row costs half a token"""
MAX_DEPTH, MAX_TOKENS, MAX_CHILDREN = 32, 32, 4
"""Tokens of a path of a draft, of all its paths, and behind one token"""
ACCEPTANCE_BINS = 16
SHARES = (np.arange(ACCEPTANCE_BINS) + 0.5) / ACCEPTANCE_BINS
"""Middle of each bin: the acceptance as long as none is known"""
PRIOR = 8.0
"""Drafted tokens that the share itself counts as"""
MEMORY = 1000
"""The weight of an observation falls to about a third while this many further tokens are observed."""
EXPLORE_EVERY, EXPLORED = 32, 2
"""Steps that look for drafts of which one tries shares that were wrong before, too; tokens a sequence that it takes"""


def step_rows(kind: str, *, paced: bool) -> StepRows:
    """Return those of a kind of card (`Device.kind`). ``paced``: its steps last as long as those of a real one."""
    return CARD if paced or kind in ("cuda", "npu") else HOST


class Acceptance:
    """How often a drafted token was right if all before it were, by its share in the text (`suffix_index`)."""

    def __init__(self) -> None:
        self._drafted, self._accepted = np.zeros(ACCEPTANCE_BINS), np.zeros(ACCEPTANCE_BINS)

    def observe(self, shares: np.ndarray, accepted: np.ndarray) -> None:
        """Record drafted tokens behind tokens that were kept, [n] both: their share, and whether they were kept."""
        bins = np.minimum((shares * ACCEPTANCE_BINS).astype(np.int64), ACCEPTANCE_BINS - 1)
        kept = 1 / (1 + len(bins) / MEMORY)
        self._drafted = kept * self._drafted + np.bincount(bins, minlength=ACCEPTANCE_BINS)
        self._accepted = kept * self._accepted + np.bincount(bins, accepted, ACCEPTANCE_BINS)

    def by_share(self) -> np.ndarray:
        """Return the expected acceptance of a token by its share, float64 [bins]; the share while little is known."""
        return (self._accepted + PRIOR * SHARES) / (self._drafted + PRIOR)


class DraftBudget:
    """Choose how much of the drafts of a step is verified. ``rows``: `CARD` or `HOST`."""

    def __init__(self, rows: StepRows = CARD) -> None:
        self.acceptance, self._rows = Acceptance(), rows
        self._steps_without, self._look_every = 0, LOOK_EVERY
        """Steps since there was a token worth a row"""
        self._looks = 0
        """Steps that looked for drafts"""

    @property
    def _explores(self) -> bool:
        return self._looks % EXPLORE_EVERY == EXPLORE_EVERY - 1

    def by_share(self) -> np.ndarray:
        """Return the acceptance that a step reckons with, float64 [bins]."""
        return SHARES if self._explores else self.acceptance.by_share()

    def min_probability(self, num_sequences: int) -> float:
        """Return how probable a drafted token must be in a step of this many sequences."""
        return max(MIN_PROBABILITY, self.row_price(num_sequences))

    def row_price(self, num_sequences: int) -> float:
        """Return how many tokens a step without drafts yields in the time of a row."""
        return num_sequences / (num_sequences + self._rows[0])

    def skips(self) -> bool:
        """Whether a step goes without drafts, so that none need be looked up."""
        steps = self._steps_without
        skips = steps % self._look_every > 0 and steps.bit_count() > 1
        self._steps_without += skips
        return skips

    def choose(
        self,
        owners: np.ndarray,
        probabilities: np.ndarray,
        num_sequences: int,
        *,
        max_tokens: int = 1 << 30,
        urgent: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return which drafted tokens are verified, bool [n], at most ``max_tokens``. ``owners``: int [n], the sequence
        of each token, in order; ``probabilities``: float64 [n], that it and all before it are right, at least
        `min_probability`; a token comes after the one before it; ``num_sequences``: that decode in this step, with a
        draft or without; ``urgent``: bool [n], tokens of sequences that come first; None: none."""
        price, (_, draft_rows, look_rows) = self.row_price(num_sequences), self._rows
        gains = np.bincount(owners, probabilities - price, minlength=1) - draft_rows * price
        gain, pays = gains[gains > 0].sum() - look_rows * price * num_sequences, (gains >= 0)[owners]
        self._look_every = LOOK_EVERY if price < 0.5 else BUSY_LOOK_EVERY
        if self._explores:
            max_tokens, pays = min(max_tokens, EXPLORED * num_sequences), np.ones(len(owners), bool)
        elif gain < 0 or probabilities[pays].sum() < MIN_GAIN * num_sequences:
            self._steps_without += 1
            max_tokens = 0
        else:
            self._steps_without = 0
        self._looks += 1
        weighted = probabilities if urgent is None else probabilities * np.where(urgent, URGENT_WEIGHT, 1.0)
        order = np.argsort(-weighted, kind="stable")
        chosen = np.zeros(len(owners), bool)
        chosen[order[pays[order]][:max_tokens]] = True
        return chosen
