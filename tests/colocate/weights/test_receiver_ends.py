"""New weights that arrive while an engine decodes: whatever happens on the engine's thread, `receive` returns."""

import threading
from types import SimpleNamespace

import pytest

from fusion.colocate.deployment import Deployment
from fusion.colocate.stages import StageReport
from fusion.colocate.weights.weight_receiver import WeightReceiver
from fusion.npu import open_device


class StillEngine:
    """Adopts nothing by itself: it does not step."""

    is_leader = True

    def __init__(self):
        self.on_adopt = lambda version: None
        self.asked = threading.Event()

    def adopt(self, version):
        self.asked.set()


def _receiver(adopt=lambda version: None):
    spec = SimpleNamespace(deployment=Deployment(train=(0,), generate=(1,), name="separate"))
    staged = SimpleNamespace(expect=lambda version: None, adopt=adopt, pause_s=0.5)
    engine = StillEngine()
    receiver = WeightReceiver(
        spec=spec,
        rank=1,
        device=open_device("emulated"),
        staged=staged,
        meshes=None,
        engine=engine,
        make_switcher=lambda **_: SimpleNamespace(to_infer=lambda *_, **__: None),
        interim_report=lambda: StageReport({}, [], {}),
    )
    return receiver, engine


def _received(receiver, until, then):
    """Calls `receive` on a thread of its own, and ``then`` once ``until`` is set; returns its report or error."""
    results = []

    def receive():
        try:
            results.append(receiver.receive(1, None))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    until.wait()
    then()
    thread.join(30)
    assert not thread.is_alive(), "it waits for an adoption that does not come"
    return results[0]


def test_the_adoption_ends_it_with_the_report_so_far():
    receiver, engine = _receiver()
    report = _received(receiver, engine.asked, lambda: engine.on_adopt(1))
    assert report.metrics["timing_s/switch/pause"].value == 0.5


def test_an_error_of_the_adoption_ends_it():
    def adopt(version):
        raise ValueError("other weights")

    receiver, engine = _receiver(adopt)

    def step():
        with pytest.raises(ValueError):
            engine.on_adopt(1)

    assert "other weights" in str(_received(receiver, engine.asked, step))


def test_the_end_of_the_engines_stage_before_the_adoption_ends_it():
    receiver, engine = _receiver()
    failed = RuntimeError("no space left")
    assert _received(receiver, engine.asked, lambda: receiver.abort(failed)) is failed


def test_an_engines_stage_that_has_ended_before_it_began_ends_it():
    receiver, _ = _receiver()
    failed, now = RuntimeError("no space left"), threading.Event()
    receiver.abort(failed)
    now.set()
    assert _received(receiver, now, lambda: None) is failed
