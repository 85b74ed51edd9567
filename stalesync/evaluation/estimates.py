"""Estimate pass@k and means over prompts, with confidence intervals. Pure.

pass@k is the probability that at least one of k answers to a prompt is correct. From n answers, c of them correct,

    pass@k = 1 - C(n - c, k) / C(n, k)

is unbiased for every k <= n (Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, eq. 1).
It is the share of the k-subsets of the answers that contain a correct one.

Intervals are Student's, over prompts: the answers to one prompt depend on each other, prompts do not, so the sample is
the mean of each prompt (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2: clustered standard errors;
with as many answers to every prompt they are these). They say how well these prompts stand for all prompts of their
kind, not how little other noise would change the answers. With few prompts that are nearly all right or nearly all
wrong they are too short, as every interval by standard errors is.

Invariants (property-tested): pass@k equals the enumeration of subsets; it grows with k and with c; the estimate of a
single answer is its mean; an interval contains its mean, and shrinks to it where all prompts are equal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95
"""Probability with which an interval covers the mean over all prompts"""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts. ``low``, ``high``: ends of its confidence interval; None: there is one prompt only."""

    value: float
    low: float | None = None
    high: float | None = None


def pass_at_each(num_samples: int, num_correct: int) -> list[float]:
    """Return the unbiased estimates of pass@1 to pass@``num_samples`` of one prompt, exact to the last bit of a float.
    The binomials follow from each other: computed again for each k, they take 17 s for 1,000 answers to each of 1,300
    prompts. ``num_samples``: answers to the prompt; ``num_correct``: correct ones among them."""
    assert 0 <= num_correct <= num_samples
    num_wrong, subsets, wrong = num_samples - num_correct, 1, 1
    shares = []
    for size in range(num_samples):  # C(n, k + 1) = C(n, k) * (n - k) / (k + 1), without a remainder
        subsets = subsets * (num_samples - size) // (size + 1)
        wrong = wrong * (num_wrong - size) // (size + 1)
        shares.append((subsets - wrong) / subsets)
    return shares


def estimate(by_prompt: Sequence[float], within: tuple[float, float] = (-math.inf, math.inf)) -> Estimate | None:
    """Return the mean over prompts with Student's interval; None: there is no prompt. ``by_prompt``: one number for
    each prompt; ``within``: the range of these numbers, which the interval does not leave."""
    count = len(by_prompt)
    if not count:
        return None
    mean = sum(by_prompt) / count
    if count == 1:
        return Estimate(mean)
    variance = math.fsum((value - mean) ** 2 for value in by_prompt) / (count - 1)
    half = student_quantile(count - 1) * math.sqrt(variance / count)
    return Estimate(mean, max(mean - half, within[0]), min(mean + half, within[1]))


@lru_cache(maxsize=1024)
def student_quantile(freedom: int) -> float:
    """Return the t for which Student's distribution of ``freedom`` degrees has CONFIDENCE between -t and t."""
    low, high = 0.0, 1.0
    while _student_between(high, freedom) < CONFIDENCE:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _student_between(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def _student_between(t: float, freedom: int) -> float:
    """Return the probability of [-t, t] (Abramowitz and Stegun, 26.7.3 and 26.7.4: a finite sum)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for index in range(2 + odd, freedom + 1, 2):
        total += term
        term *= square * (index - 1) / index
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total
