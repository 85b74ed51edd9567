"""Open the files of `eval.files` and their rewards before a card starts, so that what is wrong is refused at once."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fusion.rewards import RewardPool, Term, check_answers
from fusion.rewards.config import RewardConfig
from fusion.rewards.terms import check_term_fields, pools_of
from stalesync.evaluation.config import HELD_OUT, EvalFileSpec
from stalesync.prompts import Prompt, PromptSource
from stalesync.prompts.rows import RowCounts

if TYPE_CHECKING:
    from stalesync.job.config import Config

log = logging.getLogger(__name__)
OpenedFile = tuple[EvalFileSpec, PromptSource]
"""A file of `eval.files` and its rows"""


@dataclass(frozen=True)
class EvalFile:
    """Prompts that are evaluated together. ``name``, ``path``: in metrics, and in messages; ``prompts``: with ids that
    no training prompt has; ``reward``: what scores the answers: a rule, `file.py:function`, or the folder of a reward
    model; ``pool``: the reward's processes; None: the run's own reward; ``digest``: of the file's content; None: the
    prompts are held out of `data.source`; ``rows``: what became of the file's rows; None: it is not counted."""

    name: str
    path: str
    prompts: Sequence[Prompt]
    reward: str
    pool: RewardPool | None = None
    digest: str | None = None
    rows: RowCounts | None = None

    def describe(self) -> str:
        """Return file and reward for messages."""
        return f"{self.name!r} ({self.path}) with the reward {self.reward}"

    def asked(self, samples: int) -> list[Prompt]:
        """Return the prompts as often as each is answered. The first answer has the prompt's id, so its noise is the
        same for any number of answers; others have `<id>/<number>`."""
        return [
            replace(prompt, id=f"{prompt.id}/{number}") if number else prompt
            for prompt in self.prompts
            for number in range(samples)
        ]


def open_files(config: "Config", tokenizer: Any) -> list[OpenedFile]:
    """Read and check every row of `eval.files`, as those of `data.source` are; raise ValueError, with the file, if it
    or a row cannot be used."""
    opened = []
    for spec in config.eval.specs():
        with naming(f"eval.files: {spec.name!r}"):
            opened.append((spec, PromptSource(spec.data(config.data, rows=spec.rows), tokenizer, config.run.seed)))
    return opened


def with_rewards(
    config: "Config",
    opened: Iterable[OpenedFile],
    *,
    held_out: Sequence[Prompt],
    held_out_rows: RowCounts | None = None,
    rule: RewardPool | None,
    terms: Sequence[Term] = (),
    start: Callable[[RewardConfig], RewardPool],
    num_answers: int = 64,
) -> list[EvalFile]:
    """Start the rewards of the files, one for all files that share it, and check the fields that they require.
    ``held_out``, ``held_out_rows``: held-out prompts of `data.source`, and what became of their rows; ``rule``: the
    run's own reward, without its terms; None: a reward model; ``terms``: of the run's own reward; ``start``: starts the
    processes of a reward, and sees to their end; ``num_answers``: reference answers of a file that are checked at most.
    Raise ValueError, with the file, if a reward cannot be loaded or requires a field that it lacks."""
    bare = config.reward.model or config.reward.path or config.reward.name
    own = " + ".join([bare, *(f"{term.spec.weight:g} {term.spec.name}" for term in terms)])
    origin = f"data.source={config.data.source}"
    files = [EvalFile(HELD_OUT, origin, held_out, own, rows=held_out_rows)] if held_out else []
    pools: dict[str, RewardPool] = {}
    for spec, source in opened:
        with naming(f"eval.files: {spec.name!r}"):
            pool = None
            if spec.reward is not None and spec.reward != own:
                pool = rule if spec.reward == bare else pools.get(spec.reward)
                pool = pools[spec.reward] = pool or start(config.reward.of(spec.reward))
            scoring, added = (rule, terms) if pool is None else (pool, ())
            if scoring is not None:
                scoring.check_fields(source.rows.fields)
            check_term_fields(added, source.rows.fields)
            for line in check_answers(pools_of(scoring, added), source.reference_answers(num_answers)):
                log.warning("eval.files: %r: %s", spec.name, line)
            prompts = source.in_order(f"eval-{spec.name}-")
            if not prompts:
                raise ValueError(f"no prompt is as short as data.max_prompt_length={config.data.max_prompt_length}")
        reward = own if pool is None else spec.reward or own
        files.append(EvalFile(spec.name, spec.path, prompts, reward, pool, source.rows.digest, source.counts(prompts)))
    return files


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Prefix the message of a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
