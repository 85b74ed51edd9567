"""Suspended samples: what they have so far waits in the queue until an engine resumes them.

    engine ─► Output(abort or chunk) ─── put ─► row `<id>~<tokens>` in the queue: partial_* columns, read by no task
                                                  │
    engine ◄─ Request(response=…) ◄─ restore ─────┤            the sample's own row is put when it finishes, with the
    engine ─ finishes ─► Output ─── put ──────────┴─► queue    tokens, logprobs and versions of all its parts

Nothing but the queue holds them, so any engine may resume them, and a checkpoint of the queue contains them. Their KV,
where it is kept, stays with the engine that computed it (`fusion.inference.parked`), to which `kv_rank` leads them
back, or is in the machine's pool (`fusion.inference.pooled`).

Of a conversation whose turn has ended, the row also has that turn's text and tokens, which the controller reads. It
adds what the environment has answered, as token ids (`OBSERVATION`): whoever resumes or finishes the sample reads what
was generated and observed. `complete` finishes one whose environment has ended, or a branch behind which another one
continues.

If the queue has lost what a sample has so far, the sample cannot be completed: it ends as lost, too.

Invariants: a sample has at most one such row, the latest, except while a newer one is being put beside it; a row is
dropped by the card that put its replacement."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from distqueue import Column, PackedBatch, SampleQueue, SamplesLost
from fusion.inference import Output, Request
from fusion.rollout.packing import KEPT, GeneratedNames, generated_columns, pack_outputs
from fusion.rollout.types import EndedConversation, SuspendedSample, parse_row, row_of

PARTIAL = GeneratedNames(
    "partial_response",
    "partial_logprobs",
    "partial_versions",
    kept=("partial_kept_counts", "partial_kept_ids"),
    routing="partial_routing",
    sampled="partial_sampled",
)
COLUMNS = PARTIAL.tokens, PARTIAL.logprobs, PARTIAL.versions
TURN, TURN_TOKENS = "turn", "turn_tokens"
"""Columns of text and token ids, int64 [t], sampled since the last observation; only of rows whose turn has ended"""
OBSERVATION = "observation"
"""Column of the token ids, int64 [m], that an environment has answered, up to where the model speaks again"""
RESUMED = "resumed"
"""Why a partial row is dropped: a newer row, or the finished sample, replaces it"""
LOST_PARTS = "earlier tokens"
"""Why a sample is lost that could not be resumed or completed"""
log = logging.getLogger(__name__)


class PartialSamples:
    """The suspended samples of one card. ``caches``: keep in memory what `restore` read, for `put`. Only where this
    card sees the end of every request that it restores: another card's would never be freed; ``routing``: outputs have
    their routing; ``kept``: outputs have their kept ids; ``turns``: samples are conversations; ``detokenize``: gives
    finished responses their text; None: they get none."""

    def __init__(
        self,
        queue: SampleQueue,
        caches: bool = False,
        routing: bool = False,
        kept: bool = False,
        turns: bool = False,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ):
        self._queue, self._caches, self._detokenize = queue, caches, detokenize
        self._detokenizing = threading.Lock()
        """`put` and `complete` may be called at the same time"""
        recorded = {PARTIAL.routing: routing, PARTIAL.sampled: turns} | dict.fromkeys(PARTIAL.kept, kept)
        self._columns = (*COLUMNS, *(name for name, is_recorded in recorded.items() if is_recorded))
        self._cached: dict[str, dict[str, torch.Tensor]] = {}
        """Columns by row and name"""

    def restore(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests, with the tokens of the `earlier` row that some name; without those whose row is lost."""
        needed = [name for name in self._columns if name in (PARTIAL.tokens, PARTIAL.sampled)]
        columns_by_row = self._read_earlier(requests, self._columns if self._caches else needed)
        if self._caches:
            self._cached |= {
                row: {name: column.clone() for name, column in columns.items()}
                for row, columns in columns_by_row.items()
            }
        lost = [request for request in requests if request.earlier and request.earlier not in columns_by_row]
        lose_rows(self._queue, {output.id: output.group for output in lost})
        return [
            _resume(request, columns_by_row[request.earlier]) if request.earlier else request
            for request in requests
            if not request.earlier or request.earlier in columns_by_row
        ]

    def put(self, finished: Sequence[Output], suspended: Sequence[Output] = ()) -> list[SuspendedSample]:
        """Put finished samples to the queue, with what was generated before in front, and suspended ones as partial
        rows; drop the rows that both replace. Return the suspended ones, without those whose row is lost."""
        grown = [output for output in suspended if output.tokens]
        for output in suspended:
            if not output.tokens:
                self._cached.pop(output.earlier, None)
        columns_by_row = self._take_earlier([*finished, *grown])
        lost = [output for output in (*finished, *grown) if output.earlier and output.earlier not in columns_by_row]
        if lost:
            lost_ids = {output.request_id: output.group for output in lost}
            lose_rows(self._queue, lost_ids)
            finished, grown, suspended = (
                [one for one in outputs if one.request_id not in lost_ids] for outputs in (finished, grown, suspended)
            )
        merged = _merge([*finished, *grown], columns_by_row)
        whole, partial = merged[: len(finished)], merged[len(finished) :]
        if branches := [output for output in whole if output.finish_reason == "turn"]:
            self._queue.put(pack_outputs(branches))
        if whole := [output for output in whole if output.finish_reason != "turn"]:
            self._queue.put(pack_outputs(whole, self._texts([output.tokens for output in whole])))
        row_by_id = {output.request_id: row_of(output.request_id, len(output.tokens)) for output in partial}
        if partial:
            self._put_partial(partial, row_by_id)
        if replaced := [output.earlier for output in (*finished, *grown) if output.earlier]:
            self._queue.drop(replaced, RESUMED)
        span_by_id = {one.request_id: (min(v for v in one.versions if v >= 0), max(one.versions)) for one in partial}
        return [
            SuspendedSample(
                id=output.request_id,
                generated=len(output.before) + len(output.tokens),
                earlier=row_by_id.get(output.request_id, output.earlier),
                versions=span_by_id.get(output.request_id),
                kv_rank=output.kv_rank,
                kv_tokens=output.kv_tokens,
                turn=output.finish_reason == "turn",
            )
            for output in suspended
        ]

    def _put_partial(self, partial: Sequence[Output], row_by_id: Mapping[str, str]) -> None:
        """Put the rows of whole outputs that go on; those whose turn has ended with their text."""
        ended = [output for output in partial if output.finish_reason == "turn"]
        others = [output for output in partial if output.finish_reason != "turn"]
        for outputs in filter(None, (ended, others)):
            columns = generated_columns(outputs, PARTIAL)
            if outputs is ended:
                turns = [output.tokens[_turn_start(output.sampled) :] for output in ended]
                columns[TURN_TOKENS] = Column.of_numbers(turns, torch.int64, TURN_TOKENS)
                columns |= {TURN: self._texts(turns)} if self._detokenize else {}
            rows = [row_by_id[output.request_id] for output in outputs]
            self._queue.put(PackedBatch.from_samples(rows, columns))

    def complete(self, ended: Sequence[EndedConversation]) -> None:
        """Put conversations and branches as finished samples, and drop their rows; those whose row is lost end as lost.
        On any thread."""
        self.put(
            [
                Output(
                    parse_row(output.row)[0],
                    output.group,
                    output.prompt,
                    finish_reason="turn" if output.continues else "length" if output.cut else "stop",
                    earlier=output.row,
                )
                for output in ended
            ]
        )

    def _texts(self, responses: Iterable[Sequence[int]]) -> list[str]:
        """Return the texts of tokens; none without a detokenizer."""
        if self._detokenize is None:
            return []
        with self._detokenizing:
            return [self._detokenize(tokens) for tokens in responses]

    def _take_earlier(self, outputs: Sequence[Output]) -> dict[str, dict[str, torch.Tensor]]:
        cached = {one.earlier: self._cached.pop(one.earlier) for one in outputs if one.earlier in self._cached}
        return cached | self._read_earlier([one for one in outputs if one.earlier not in cached], self._columns)

    def _read_earlier(
        self, resumed: Sequence[Request | Output], columns: Sequence[str]
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Return the columns of earlier rows, with observations where there are any, without rows that are lost."""
        columns_by_row = read_rows(self._queue, [request.earlier for request in resumed if request.earlier], columns)
        observed = [request.earlier for request in resumed if request.observation and request.earlier in columns_by_row]
        observations = read_rows(self._queue, observed, [OBSERVATION])
        for row in observed:
            if row in observations:
                columns_by_row[row] |= observations[row]
            else:
                del columns_by_row[row]
        return columns_by_row


def read_rows(queue: SampleQueue, rows: Sequence[str], columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return columns by row and name, without the rows that are lost."""
    while rows:
        try:
            batch = queue.read(rows, columns)
        except SamplesLost as error:
            log.error("suspended samples cannot be resumed: %s", str(error))
            gone = set(error.ids)
            rows = [row for row in rows if row not in gone]
            continue
        return {id: {name: batch[name][i] for name in columns} for i, id in enumerate(batch.ids)}
    return {}


def lose_rows(queue: SampleQueue, group_by_id: Mapping[str, str]) -> None:
    """End samples as lost, whose earlier tokens are."""
    if group_by_id:
        queue.put(PackedBatch((*group_by_id,), {}, (*group_by_id.values(),)))
        queue.lose([*group_by_id], LOST_PARTS)


def check_kept(holding: Callable[[str], Iterable[str]], truncates: bool) -> None:
    """Check that the rows of a restored queue have kept ids exactly where this run's sampling records them.
    ``holding``: returns the rows that hold a column. Raise ValueError if rows that are not trained yet would be
    continued or trained with another distribution."""
    for column, kept in (("behaviour_logprobs", KEPT[0]), (PARTIAL.logprobs, PARTIAL.kept[0])):
        recorded = {*holding(kept)}
        differ = {*holding(column)} - recorded if truncates else recorded
        if differ:
            was = "without a record of the ids that were kept" if truncates else "with a filter"
            expected = "top_p=1, top_k=0 and min_p=0" if truncates else "top_p, top_k or min_p as before"
            raise ValueError(
                f"rollout.sampling.top_p: cannot resume: {len(differ)} samples that are not trained yet were sampled "
                f"{was}; expected rollout.sampling.{expected} until they are trained"
            )


def _merge(outputs: Sequence[Output], columns_by_row: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Output]:
    """Return the outputs with what was generated before them in front."""
    merged = []
    for output in outputs:
        if output.earlier:
            columns = columns_by_row[output.earlier]
            tokens, logprobs, versions = (columns[name].tolist() for name in COLUMNS)
            counts, ids, sampled = (
                columns[name] if name in columns else torch.empty(0) for name in (*PARTIAL.kept, PARTIAL.sampled)
            )
            observation = _observation(output, columns)
            said = len(observation)
            # A conversation that is completed has no new tokens, nor those before them.
            resumed = not output.tokens or (*tokens, *observation) == output.before
            assert resumed, f"sample {output.request_id!r} resumed from other tokens"
            routing = [one for one in (columns.get(PARTIAL.routing), output.routing) if one is not None]
            output = replace(
                output,
                tokens=tokens + observation + output.tokens,
                logprobs=logprobs + [0.0] * said + output.logprobs,
                versions=versions + [-1] * said + output.versions,
                before=(),
                observation=0,
                routing=torch.cat(routing) if routing else None,
                kept_counts=counts.tolist() + [0] * (said if PARTIAL.kept[0] in columns else 0) + output.kept_counts,
                kept_ids=ids.numpy().tobytes() + output.kept_ids,
                sampled=sampled.tolist() + [False] * said + output.sampled,
            )
        merged.append(output)
    return merged


def _resume(request: Request, columns: Mapping[str, torch.Tensor]) -> Request:
    """Return a request with its tokens so far as its response."""
    response = (*columns[PARTIAL.tokens].tolist(), *_observation(request, columns))
    if PARTIAL.sampled not in columns:
        return replace(request, response=response)
    start = len(response) if request.observation else _turn_start(columns[PARTIAL.sampled].tolist())
    return replace(request, response=response, turn_start=start)


def _observation(one: Request | Output, columns: Mapping[str, torch.Tensor]) -> list[int]:
    """Return what the environment has answered behind the row of ``columns``."""
    observation: list[int] = columns[OBSERVATION].tolist() if one.observation else []
    assert len(observation) == one.observation, f"row {one.earlier!r} has {len(observation)} tokens of an observation"
    return observation


def _turn_start(sampled: Sequence[bool]) -> int:
    """Return the index behind the last token that was not sampled."""
    return next((index for index in range(len(sampled), 0, -1) if not sampled[index - 1]), 0)
