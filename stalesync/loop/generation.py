"""Control the engines: call the cards' stages as decided in `admission.py`.

publish ─► dispatch ─► engines: `generate` in the background ─► queue
              ▲          │
              ├ chunks ──┤   requests suspended at the end of their chunk, while engines run
              └ stop ────┘   unfinished requests of engines that stop

A card runs its stages one after the other, in the order in which they are begun. So the next stage is begun behind a
switch, and a switch behind `generate`, before this process has heard of its end: the card waits for no message."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fusion.colocate import InferenceShare, StageReport, Worker, WorkerSpec
from fusion.inference import Request
from fusion.inference.request import NO_REWARDS
from fusion.inference.request_columns import Requests
from fusion.rollout import EvalAnswer, SuspendedSample, assign_groups
from fusion.rollout.types import conversation_of
from stalesync.cards.cards import WARN_EVERY_S, Cards
from stalesync.cards.stage_calls import RunningStage, StageCall, describe_hanging, stage_call
from stalesync.policy.commands import Dispatch, DispatchedRequests, Publish
from stalesync.policy.reward_history import RewardHistory
from stalesync.process.failures import CardFailed, late_rank
from stalesync.prompts import Prompt
from stalesync.prompts.lengths import ForcedLengths

if TYPE_CHECKING:
    from stalesync.loop.evaluated_turns import Turns

MAX_CHUNK_WAIT_S = 60.0
"""Maximum seconds for which a call waits on an engine's first card for requests whose chunk has ended."""
EVAL_ROWS = "eval/"
"""How the ids of the queue's rows begin that hold the answers to held-out prompts"""
log = logging.getLogger(__name__)


class Generation:
    """Run the engines, which are numbered as in ``spec.engines``. ``prompts``: prompts of the groups in progress, by
    id; ``take_reports``: called with the reports of the cards; ``on_ended_chunks``: called on another thread when
    `take_ended_chunks` has something to return; ``rewards``: of the last groups of the data rows, for drafts from them;
    None: there are no such drafts."""

    def __init__(
        self,
        spec: WorkerSpec,
        cards: Cards,
        prompts: Mapping[str, Prompt],
        take_reports: Callable[[Sequence[StageReport]], None],
        on_ended_chunks: Callable[[], None] = lambda: None,
        rewards: RewardHistory | None = None,
    ) -> None:
        self._rewards = rewards
        self._spec, self._cards, self._prompts, self._take_reports = spec, cards, prompts, take_reports
        ends = None if spec.detokenizer is None else spec.detokenizer.end_token_ids
        self._sampling = spec.rollout.sampling_params(stop_token_ids=ends)
        self._sampling_fields = asdict(self._sampling)
        self._chunk_tokens = spec.rollout.max_chunk_tokens
        self._on_ended_chunks = on_ended_chunks
        self.branch_of: Callable[[str], tuple[Sequence[int], int]] | None = None
        """Gives prompt and maximum tokens of a branch of a conversation that is not its first"""
        self._lengths = ForcedLengths.of(spec.rollout, spec.seed)
        self._running: dict[int, RunningStage[StageReport]] = {}
        """Running `generate` stages by engine"""
        self._publishing: list[RunningStage[StageReport]] = []
        """The switch for the engines, until its reports are taken; then the engines that receive while they generate"""
        self._returning: RunningStage[StageReport] | None = None
        """The switch back to the training phase, until its reports are taken"""
        self._stopping = False
        """Whether the running engines stop by themselves"""
        self._asked_chunks: dict[int, Any] = {}
        """First card of a running engine → the call that waits there for ended chunks"""
        self._warned_silent_s = 0.0
        """Seconds without a sample at the last warning"""

    def begin_publish(self, command: Publish, share: InferenceShare) -> None:
        """Begin to publish the weights of a policy version to the engines of ``share``; `end_publish` must follow. If
        no engine runs, `dispatch` may start engines behind the switch of the cards."""
        actor = self._spec.deployment.actor
        overlapped = [rank for engine in command.overlapped for rank in self._spec.engines[engine]]
        if not overlapped:
            self._publishing = [self._cards.on(actor).begin(Worker.switch, "infer", command.version, share)]
            return
        others = self._cards.on([rank for rank in actor if rank not in overlapped])
        receiving = self._cards.on(overlapped).begin(Worker.receive, command.version, share)
        switching = others.begin(Worker.switch, "infer", command.version, share, while_generating=True)
        self._publishing = [switching, receiving]

    @property
    def publishing(self) -> bool:
        """Whether weights are being published, and the cards' reports are not taken yet."""
        return bool(self._publishing)

    def end_publish(self) -> None:
        """Wait until the engines have the weights, and take the reports. Raise EnginesLost if weights must be published
        again; no engine runs that was started behind the switch."""
        assert self._publishing, "no weights are being published"
        reports = self._cards.wait_all(self._publishing)
        self._publishing = []
        for stage in reports:
            self._take_reports(stage)
        if len(reports) > 1:  # the engines have received between two of their steps
            for running in self._running.values():
                running.reported_until_ns = min(report.until_ns for report in reports[-1])

    @property
    def returning(self) -> bool:
        """Whether the switch back to the training phase was begun, and its reports are not taken yet."""
        return self._returning is not None

    def begin_switch_to_train(self, version: int, share: InferenceShare) -> None:
        """Begin to return the cards that train to the training phase, behind the stages that they run now."""
        self._returning = self._cards.on(self._spec.deployment.train).begin(Worker.switch, "train", version, share)

    def begin_return(self, version: int, share: InferenceShare) -> None:
        """Begin to return the cards that train, if they can do so without waiting for each other: behind the stage of
        an engine that has all of them and stops by itself, or when all engines have stopped."""
        if self._returning is not None or not self._stopping:
            return
        running = list(self._running.values())
        alone = len(running) == 1 and {*running[0].ranks} >= {*self._spec.deployment.train}
        if alone or not any(stage.pending for stage in running):
            self.begin_switch_to_train(version, share)

    def switch_to_train(self, version: int, share: InferenceShare) -> None:
        """Return the cards that train to the training phase, if that is not begun yet, and wait for them."""
        if self._returning is None:
            self.begin_switch_to_train(version, share)
        assert self._returning is not None
        returning, self._returning = self._returning, None
        self._take_reports(self._cards.wait(returning))

    def dispatch(self, command: Dispatch) -> None:
        """Start engines with their requests, submit requests to running ones, and free unused parked KV. Only the
        first, while the cards switch for the engines."""
        submitted: dict[int, StageCall[None]] = {}
        for engine, dispatched in command.requests_by_engine.items():
            ranks, requests = self._spec.engines[engine], self._requests(dispatched)
            if engine in command.starting:
                calls = {rank: stage_call(Worker.generate, [], stay=not command.last) for rank in ranks[1:]}
                first = stage_call(Worker.generate, requests, stay=not command.last)
                self._running[engine] = self._cards.begin_each({ranks[0]: first, **calls})
            else:
                submitted[ranks[0]] = stage_call(Worker.submit, requests)
        self._stopping = command.last
        assert not (self.publishing and (submitted or command.forget_by_engine)), "the cards switch"
        self._cards.ask_each(submitted)
        left = {self._spec.engines[engine][0]: ids for engine, ids in command.forget_by_engine.items()}
        self._cards.ask_each({rank: stage_call(Worker.forget, ids) for rank, ids in left.items()})

    def pause(self, engines: Sequence[int]) -> None:
        """Have engines stop between two steps; `stop` must follow."""
        if not self._stopping:  # a pause would find its engine in a later stage
            self._cards.on([self._spec.engines[engine][0] for engine in engines]).ask(Worker.pause)

    def stop(self, engine: int) -> list[SuspendedSample]:
        """Wait until an engine has stopped; return its unfinished requests. Raise EnginesLost if it has died."""
        reports = self._cards.wait(self._running.pop(engine))
        self._take_reports(reports)
        suspended = [sample for report in reports for sample in report.suspended]
        first = self._spec.engines[engine][0]
        asked = {first: self._asked_chunks.pop(first)} if first in self._asked_chunks else {}
        while asked:  # answered when the stage ends
            for samples in self._cards.take_answers(asked, WARN_EVERY_S).values():
                suspended += samples
            self._cards.check()
        return suspended

    def forget(self, engine: int) -> None:
        """Forget an engine that runs no more."""
        self._running.pop(engine, None)
        self._asked_chunks.pop(self._spec.engines[engine][0], None)

    def take_ended_chunks(self) -> dict[int, list[SuspendedSample]]:
        """Return, by engine, the requests whose chunk has ended since the last call. One call waits on the first card
        of each running engine until there are some."""
        if not (self._chunk_tokens or self._spec.turns) or self.publishing:
            return {}
        engine_of = {self._spec.engines[engine][0]: engine for engine in self._running}
        answers = self._cards.take_answers(self._asked_chunks)
        if unasked := [rank for rank in engine_of if rank not in self._asked_chunks]:
            call = stage_call(Worker.await_ended_chunks, MAX_CHUNK_WAIT_S)
            self._asked_chunks |= self._cards.begin_asking(call, unasked, self._on_ended_chunks)
        return {engine_of[rank]: samples for rank, samples in answers.items() if samples}

    def check_silence(self, silent_s: float, num_running_on: Callable[[int], int]) -> None:
        """Warn if no sample has arrived for ``silent_s`` seconds; after the stage timeout raise CardFailed, which names
        the running engines and the number of their samples."""
        if silent_s < min(self._warned_silent_s + WARN_EVERY_S, self._cards.timeout_s):
            self._warned_silent_s = min(self._warned_silent_s, silent_s)
            return
        self._warned_silent_s = silent_s
        engines = ", ".join(
            f"engine {engine} (ranks {list(self._spec.engines[engine])}) has {num_running_on(engine)} samples"
            for engine in self._running
        )
        if silent_s > self._cards.timeout_s:
            hanging = self._cards.find_unresponsive()
            message = (
                f"no sample has arrived for {silent_s:.0f} s (cluster.stage_timeout_s): {engines}"
                f"{describe_hanging(hanging, self._cards.hosts)}"
            )
            raise CardFailed(message, failure=late_rank(hanging[0], "generate", message) if hanging else None)
        log.warning("no sample has arrived for %.0f s: %s", silent_s, engines)

    def begin_answers(
        self,
        prompts: Sequence[Prompt],
        engines: Sequence[int],
        *,
        spoken: "Mapping[str, Turns] | None" = None,
        sampling: Mapping[str, Any] | None = None,
        for_model: bool = False,
    ) -> list[RunningStage[StageReport]]:
        """Begin to answer each prompt once; return the stage of each engine, for `take_answers`. Prompts whose ids are
        equal up to a slash are equal, and share their KV. Called while no engine runs. ``spoken``: what was said behind
        each prompt, by its id, in a run with environments; ``sampling``: fields of `SamplingParams` in which the
        answers differ from the rollouts; ``for_model``: the reward model scores the answers: their tokens are stored in
        the queue, in rows that no task receives."""
        assert not self._running, "engines must be suspended before they answer"
        rows = f"{EVAL_ROWS}{uuid4().hex}/" if for_model else ""
        params = replace(self._sampling, **(sampling or {}))
        by_group: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            by_group.setdefault(prompt.id.partition("/")[0], []).append(prompt)
        load_by_group = {group: sum(len(prompt.ids) for prompt in asked) for group, asked in by_group.items()}
        requests = {
            group: [self._asked(Request(prompt.id, prompt.ids, params, group=group), spoken or {}) for prompt in asked]
            for group, asked in by_group.items()
        }
        running: list[RunningStage[StageReport]] = []
        for engine, groups in zip(engines, assign_groups(load_by_group, [0] * len(engines)), strict=True):
            first, *others = self._spec.engines[engine]
            calls = {rank: stage_call(Worker.answer, [], rows) for rank in others}
            calls[first] = stage_call(Worker.answer, [request for group in groups for request in requests[group]], rows)
            running.append(self._cards.begin_each(calls))
        return running

    def forget_answers(self, ids: Sequence[str], engines: Sequence[int]) -> None:
        """Free the KV that engines have parked of conversations that are answered."""
        forget = stage_call(Worker.forget, ids)
        self._cards.ask_each({self._spec.engines[engine][0]: forget for engine in engines})

    def take_answers(self, running: RunningStage[StageReport]) -> dict[str, EvalAnswer]:
        """Wait until an engine has answered; return its answers by the prompt's id. Raise EnginesLost if it died."""
        reports = self._cards.wait(running)
        self._take_reports(reports)
        return {answer.id: answer for report in reports for answer in report.answers}

    def _asked(self, request: Request, spoken: "Mapping[str, Turns]") -> Request:
        """Return a request for an answer, with what was said behind its prompt."""
        if (said := spoken.get(request.id)) is None:
            return request
        return replace(
            request,
            id=said.name,
            params=replace(request.params, max_tokens=said.max_tokens or request.params.max_tokens),
            response=said.response,
            observation=said.observation,
            turns=self._spec.turns,
            turn_start=len(said.response),
        )

    def _requests(self, dispatched: DispatchedRequests) -> Requests:
        """Return the requests with what their prompts and the run's settings add."""
        ids, groups, count = dispatched.ids, dispatched.groups, len(dispatched.ids)
        distinct = list(dict.fromkeys(groups))
        index_by_group = {group: index for index, group in enumerate(distinct)}
        indices, same = [index_by_group[group] for group in groups], [0] * count
        exact_tokens = [0] * count
        if self._lengths is not None:
            exact_tokens = [
                self._lengths(group, int(conversation_of(id).rsplit("/", 1)[1]))
                for id, group in zip(ids, groups, strict=True)
            ]
        prompts, params = [self._prompts[group].ids for group in distinct], [self._sampling_fields]
        prompt_of, params_of = [*indices], [*same]
        for index, id in enumerate(ids) if self._spec.turns else ():
            if (conversation := conversation_of(id)) != id and self.branch_of is not None:
                prompt, max_tokens = self.branch_of(conversation)
                prompt_of[index], params_of[index] = len(prompts), len(params)
                prompts.append(tuple(prompt))
                params.append({**self._sampling_fields, "max_tokens": max_tokens})
        last_rewards = ([NO_REWARDS], same)
        if self._rewards is not None:
            last_rewards = ([self._rewards.of(group) for group in distinct], indices)
        return Requests(
            {
                "id": ids,
                "prompt": (prompts, prompt_of),
                "params": (params, params_of),
                "group": (distinct, indices),
                "response": ([()], same),
                "chunk_tokens": [self._chunk_tokens] * count,
                "exact_tokens": exact_tokens,
                "earlier": dispatched.earlier,
                "kv_rank": dispatched.kv_ranks,
                "priority": dispatched.priorities,
                "kv_tokens": dispatched.kv_tokens,
                "kv_engine": dispatched.kv_engines,
                "last_rewards": last_rewards,
                "turns": [self._spec.turns] * count,
                "observation": dispatched.observations,
                "turn_start": [0] * count,
            }
        )
