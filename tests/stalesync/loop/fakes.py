"""A controller without cards: its real parts where they need none, and small ones that record what is called."""

from contextlib import nullcontext

from fusion.colocate import InferenceShare
from fusion.rollout import RequestBuffer
from stalesync.job.config import Config
from stalesync.loop.controller import Controller
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
    """Engines that start and switch at once. ``published``: whether weights reach them."""

    def __init__(self, order, published=True):
        self.order, self.published, self.publishing = order, published, False

    def begin_publish(self, command, share):
        self.order.append("publish")
        self.publishing = True

    def end_publish(self):
        self.order.append("end_publish")
        self.publishing = False
        return self.published

    def recover(self):
        self.order.append("recover")

    def dispatch(self, command):
        self.order.append("dispatch")


class Restarts:
    num_restarts = 0

    def __init__(self, order):
        self.order = order

    def check(self): ...

    def rejoin(self):
        self.order.append("rejoin")

    def return_unstarted(self, engine):
        self.order.append(f"return of {engine}")

    def observe(self):
        self.order.append("observe")


class Admission:
    """Decides nothing: yields ``commands`` in every step."""

    stage, running = "switch", (0, 1)

    def __init__(self, commands=()):
        self.commands, self.ledger, self.buffer = commands, StalenessLedger(0, 1), RequestBuffer()

    def step(self, steps_left, share):
        yield from self.commands

    def observe_seconds(self, command, seconds): ...

    def take_lent_s(self):
        return 0.0


class Cards:
    """Cards of which engine 0 is down."""

    reported_until_ns = 0

    def is_down(self, engine):
        return engine == 0

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
    step, size, num_noted_lost, num_failed_rewards = 0, 1, 0, 0

    def __init__(self, order):
        self.order = order

    def admit(self, prompts):
        self.order.append("admit")

    def note_lost(self, lost):
        return lost


class Scorer:
    def __init__(self):
        self.lost = []

    def take_reports(self):
        return []

    def note_lost(self, samples):
        self.lost += samples


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


def make_controller(order, commands=(), *, published=True, kind=Controller, **parts):
    """Return a controller of two engines that notes in ``order`` what it does. ``parts``: in place of these."""
    folder = parts.get("folder") or Folder()
    defaults = dict(
        config=Config(),
        admission=Admission(commands),
        cards=Cards(),
        queue=Queue(),
        source=Source(),
        scorer=Scorer(),
        groups=Groups(order),
        generation=Generation(order, published),
        restarts=Restarts(order),
        updater=None,
        desk=Desk(),
        step_metrics=StepMetrics(2, folder),
        rows=Rows(order),
        folder=folder,
        view=View(),
    )
    return kind(**{**defaults, **parts})
