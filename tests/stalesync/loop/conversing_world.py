"""Hold conversations between real decisions, a real queue and a real buffer; environments and cards only note."""

from types import SimpleNamespace

import torch

from distqueue import LocalQueue, PackedBatch
from fusion.environments import Stepped, Turn
from fusion.rollout.types import SuspendedSample, row_of
from stalesync.loop.conversing import Conversing
from stalesync.loop.groups import Groups
from stalesync.policy.admission import Admission
from stalesync.policy.commands import AdmitGroups, AwaitSamples
from stalesync.policy.conversations import ConversationSpec
from stalesync.policy.staleness import StalenessLedger
from stalesync.prompts import Prompt
from stalesync.prompts.environments import Environments
from tests.stalesync.fake_cluster import share_of, spec_of

SIZE = 3
SPEC = ConversationSpec(3, 20, episode_timeout_s=100, retries=0)


class Pool:
    """Environments that answer when they are told to."""

    def __init__(self):
        self.begun, self.ended, self.answers, self.refused = {}, [], [], set()
        self.first = {}
        """What environments say first, by the prompt, where it is not `hi`"""

    def reset(self, tasks):
        return [
            Stepped("", None, failure="raised", detail="no")
            if task.prompt in self.refused
            else Stepped("", Turn([{"role": "user", "content": self.first.get(task.prompt, "hi")}]), "d0")
            for task, _ in tasks
        ]

    def begin(self, order):
        assert order.id not in self.begun
        self.begun[order.id] = order

    def poll(self):
        answers, self.answers = self.answers, []
        return answers

    def end(self, ids):
        self.ended += ids
        for id in ids:
            self.begun.pop(id, None)

    def answer(self, id, turn=None, **fields):
        order = self.begun.pop(id)
        self.answers.append(Stepped(id, turn, f"d{len(order.actions)}", seconds=0.5, **fields))


class Bridge:
    rewrites = False

    def first(self, messages, tools):
        if messages[0]["content"] == "refused":
            raise ValueError("the chat template refuses the prompt")
        return [1, 2, 3] * (22 if messages[0]["content"] == "long" else 1) + [8] * (len(messages) - 1)

    def end_of(self, turn):
        return turn[-1], len(turn) > 3

    def has_thought(self, tokens):
        return False

    def bridge(self, end, messages, *, had_thought, earlier, first):
        assert [message["content"] for message in first] == ["hi"]
        if messages[0]["content"] == "refused":
            raise ValueError("the chat template refuses the prompt")
        *before, last = [message["content"] for message in earlier if message["role"] == "assistant"]
        assert end == (len(last), len(last) > 3) and had_thought == any(len(text) > 3 for text in before)
        return None if self.rewrites else [9] * len(messages[0]["content"])


class World:
    """A run at staleness 1 whose engine 0 has all requests, of ``num_groups`` groups a step."""

    def __init__(self, spec=SPEC, *, num_groups=1, size=SIZE, pool=None, bridge=None):
        self.queue, self.pool = LocalQueue(["reward", "train"]), pool or Pool()
        self.calls, self.lost, self.failures = [], [], []
        slots = (num_groups + 3) * size
        admitted = spec_of("separate", group_size=size, ahead=True, turns=True, engine_slots=slots)
        self.admission = Admission(admitted, StalenessLedger(num_groups, 1))
        self.folder = SimpleNamespace(
            log_groups=lambda step, groups, ended, **_: self.log.extend((g, ended) for g in groups)
        )
        self.log, self.living, self.drawn = [], [0, 1, 2, 3, 4, 5], 0
        algorithm = SimpleNamespace(filter_rule=lambda rewards: "")
        self.groups = Groups(size, self.admission, {}, algorithm, queue=self.queue, folder=self.folder)
        environments = Environments.__new__(Environments)
        environments.__dict__ |= dict(
            pool=self.pool, bridge=bridge or Bridge(), tracked=[], _held=[], _seed=0, _max_prompt_tokens=64
        )
        environments.config = SimpleNamespace(retries=spec.retries, label="environment.name='x'")
        environments.arrived = SimpleNamespace(clear=lambda: None)
        self.conversing = Conversing(
            environments=environments,
            spec=spec,
            engines=[[1], [2]],
            cards=self,
            queue=self.queue,
            groups=self.groups,
            scorer=SimpleNamespace(note_lost=self.lost.extend, observe_outcomes=self.failures.extend),
            source=self,
            data=SimpleNamespace(max_prompt_length=64, long_prompts="refuse"),
        )
        for command in self.admission.step(9, share_of([0])):
            if isinstance(command, AdmitGroups):
                self.groups.admit(self.conversing.next(command.count))
            if isinstance(command, AwaitSamples):
                break
        self.group = next(iter(self.groups.prompts))
        self.ids = self.groups.ids_of(self.group)

    def next(self, count):
        prompts = [Prompt(f"g{self.drawn + n}", (0,), f"g{self.drawn + n}", "") for n in range(count)]
        self.drawn += count
        return prompts

    def ask_each(self, calls):
        ((self.rank, call),) = calls.items()
        self.calls.append((self.rank, [one.row for one in call.args[0]]))
        return [None]

    def turn(self, id, tokens, text="a"):
        row = row_of(id, tokens)
        said = torch.arange(1, len(text) + 1)
        self.queue.put(PackedBatch.from_samples([row], {"turn": [text], "turn_tokens": [said]}))
        self.admission.observe_chunks_ended(0, [SuspendedSample(id, tokens, row, (0, 0), turn=True)])
        self.conversing.poll()
        return row

    def say(self, id, text="xyz", **fields):
        self.pool.answer(id, Turn([{"role": "user", "content": text}], **fields))
        self.conversing.poll()

    def entry(self, id):
        return self.admission.buffer.entries[id]
