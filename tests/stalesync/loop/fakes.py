"""A controller without cards: its real parts where they need none, and small ones that record what is called."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

from fusion.colocate import Deployment, InferenceShare
from fusion.model import Parallel
from fusion.rollout import RequestBuffer
from stalesync.cards.stage_calls import EnginesLost
from stalesync.job.config import Config
from stalesync.loop.controller import Controller
from stalesync.loop.engines import Engines
from stalesync.loop.step_metrics import StepMetrics
from stalesync.policy.staleness import StalenessLedger


class Rows:
    """Accounts of steps that note when a step begins to close, and when it is logged. ``metrics``: of each step."""

    def __init__(self, order, metrics=()):
        self.order, self.metrics = order, iter(metrics)

    def figures(self):
        self.order.append("close")
        return {}

    def acknowledge(self):
        return {}

    def take_metrics(self, figures):
        return {**figures, **next(self.metrics, {})}

    def log(self, number, metrics):
        self.order.append(f"log {number}")


class Generation:
    """Engines that start and switch at once. ``losses``: how often an engine is lost while weights are sent."""

    def __init__(self, order, losses=0):
        self.order, self.losses, self.publishing, self.lost = order, losses, False, False

    def begin_publish(self, command, share):
        self.order.append("send" if command.overlapped else "publish")
        self.publishing = True

    def end_publish(self):
        self.order.append("end_publish")
        if self.losses:
            self.losses, self.lost = self.losses - 1, True
            raise EnginesLost
        self.publishing = False

    def dispatch(self, command):
        self.order.append("dispatch")

    def take_ended_chunks(self):
        return {}


class NotedEngines(Engines):
    """Notes what is done about engine 0, which is lost at every `EnginesLost`."""

    def check(self): ...

    def suspend(self, engines):
        self.note("suspend")

    def observe(self):
        if self.generation.lost:
            self.note("lost")
            self._restarts, self.generation.lost = {0: None}, False

    def _rejoin(self):
        self.note("rejoin")
        self._restarts = {}


class Admission:
    """Decides nothing: yields ``commands`` in every step."""

    stage, running = "switch", (0, 1)

    def __init__(self, commands=()):
        self.commands, self.ledger, self.buffer = commands, StalenessLedger(0, 1), RequestBuffer()

    def step(self, steps_left, share):
        yield from self.commands

    def stop(self):
        return ()

    def observe_seconds(self, command, seconds): ...

    def take_lent_s(self):
        return 0.0


class Cards:
    reported_until_ns = 0

    def __init__(self, order):
        self.order = order

    def on(self, ranks):
        return SimpleNamespace(call=lambda stage: self.order.append(f"{stage.__name__} {ranks}"))

    def polling(self, poll):
        return nullcontext()


class Desk:
    share = InferenceShare((0,), 0.9, 4)

    def read(self, step, kv_tokens):
        return ""


class View:
    def begin(self): ...

    def begin_step(self, step): ...

    def phase(self, name, done=0, total=0): ...

    def note(self, line): ...

    def update(self, step, metrics): ...


class Groups:
    step, size, num_noted_lost, num_failed_rewards, reference = 0, 1, 0, 0, None

    def __init__(self, order):
        self.order = order

    def admit(self, prompts):
        self.order.append("admit")

    def note(self, generated, scored): ...

    def note_lost(self, lost):
        return lost


class Scorer:
    num_unscored = 0

    def __init__(self):
        self.lost = []

    def take_reports(self):
        return []

    def poll(self, timeout_s):
        return [], []

    def score_waiting(self):
        return [], []

    def wait_acknowledged(self): ...

    def note_lost(self, samples):
        self.lost += samples


class Updater:
    algorithm = SimpleNamespace(by_group=True)

    def __init__(self, order):
        self.acknowledge = partial(order.append, "acknowledge")


class Source:
    def next(self, count):
        return []

    def metrics(self):
        return {}


class Queue:
    def lost(self, num_noted):
        return [f"lost after {num_noted}"]


class Folder:
    """A run's folder that writes nothing. ``log_samples``: of a step."""

    def __init__(self, log_samples=lambda step, samples, describe: None):
        self.log_samples = log_samples

    def log_spans(self, *spans): ...

    def repeat(self, metrics): ...


def make_controller(order, commands=(), *, losses=0, kind=Controller, **parts):
    """Return a controller of two engines that notes in ``order`` what it does. ``parts``: in place of these."""
    folder = parts.get("folder") or Folder()
    cards = parts.setdefault("cards", Cards(order))
    admission = parts.setdefault("admission", Admission(commands))
    generation = parts.setdefault("generation", Generation(order, losses))
    spec = SimpleNamespace(engines=[(0,), (1,)], deployment=Deployment((2,), (0, 1)), infer_of_one_engine=Parallel())
    defaults = dict(
        config=Config(),
        spec=spec,
        queue=Queue(),
        source=Source(),
        scorer=Scorer(),
        groups=Groups(order),
        engines=NotedEngines(
            spec=spec,
            cards=cards,
            queue=None,
            admission=admission,
            groups=None,
            generation=generation,
            step_metrics=None,
            note=order.append,
        ),
        updater=Updater(order),
        desk=Desk(),
        step_metrics=StepMetrics(2, folder),
        rows=Rows(order),
        folder=folder,
        view=View(),
    )
    return kind(**{**defaults, **parts})
