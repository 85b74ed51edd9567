import pytest
import torch

from fusion.colocate.phases import Phase
from fusion.colocate.stages import StageLog, wait_kind
from fusion.npu import open_device
from fusion.telemetry import Span, summarize
from fusion.telemetry.memory import MIB
from tests.colocate.cards import Card, make_spec
from tests.helpers import run_ranks, tiny_checkpoint


@pytest.mark.parametrize(
    ("stage", "phase", "trains", "kind"),
    [
        ("train", Phase.TRAIN, True, "wait_data"),
        ("reference", Phase.STANDBY, False, "wait_data"),
        ("score", Phase.TRAIN, True, "wait_data"),
        ("switch to train", Phase.TRAIN, True, "wait_data"),
        ("switch to train", Phase.STANDBY, True, "wait_data"),
        ("switch to train", Phase.INFER, True, ""),
        ("switch to infer", Phase.INFER, False, "wait_weights"),
        ("switch to infer", Phase.TRAIN, True, ""),
        ("generate", Phase.INFER, False, "wait_weights"),
        ("generate", Phase.INFER, True, ""),
        ("save", Phase.TRAIN, True, ""),
    ],
)
def test_the_next_stage_says_what_was_waited_for(stage, phase, trains, kind):
    assert wait_kind(stage, phase, trains) == kind


def test_the_wait_lies_between_the_stages():
    log = StageLog(0, open_device("emulated"))
    with log.stage("switch to train", "switch", "wait_data"):
        pass
    with log.work("save"):
        pass
    with log.stage("train", "train", "wait_data"), log.timeline.span("read", "wait_data"):
        pass
    with log.stage("switch to infer", "switch"):
        pass
    switch, save, wait, read, train, again = log.report().spans
    assert [(one.name, one.kind) for one in (switch, wait, train)] == [
        ("switch to train", "switch"),
        ("wait_data", "wait_data"),
        ("train", "train"),
    ], "before the first stage there was none to wait after"
    assert switch.end_ns <= save.start_ns <= save.end_ns <= wait.start_ns <= wait.end_ns <= train.start_ns
    assert train.start_ns <= read.start_ns <= read.end_ns <= train.end_ns <= again.start_ns


def test_activations_are_what_the_other_owners_leave_of_the_peak():
    log = StageLog(0, device := open_device("emulated"))
    with log.stage("train", "train"):
        with device.owner("weights"):
            weights = torch.zeros(1 << 16, device=device.torch_device)
        for elements in (1 << 20, 1 << 18):
            torch.zeros(elements, device=device.torch_device)  # freed at once, as activations are
        log.record_memory("train")
    figures = log.report().memory.metrics()
    assert figures["memory/train/weights_mib"] == weights.nbytes / MIB
    assert figures["memory/train/activations_mib"] == 4 == figures["memory/train/peak_mib"] - weights.nbytes / MIB


def steps(rank, device, spec, count):
    card = Card(rank, device, spec)
    for version in range(count):
        card.step(version)
    return card.spans


def nest(spans: list[Span]) -> bool:
    """Whether one lane can show them: of any two, one holds the other or they are apart."""
    ordered, above = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)), []
    for span in ordered:
        while above and above[-1] <= span.start_ns:
            above.pop()
        if above and span.end_ns > above[-1]:
            return False
        above.append(span.end_ns)
    return True


def length(spans: list[Span], name: str) -> list[int]:
    return [span.end_ns - span.start_ns for span in spans if span.name == name]


def test_a_card_tells_all_it_does_and_separate_cards_what_they_wait_for(tmp_path):
    spec = make_spec(tiny_checkpoint(tmp_path / "model"), 2, {}, {}, deployment="separate")
    trains, generates = run_ranks(steps, 2, spec, 3)
    for spans, kinds in (
        (trains, {"prepare", "switch", "switch/reshard", "wait_data", "reference", "train", "optimizer"}),
        (generates, {"prepare", "switch", "switch/kv", "wait_weights", "gen", "prefill", "decode"}),
    ):
        [card] = summarize(spans)
        assert nest(spans) and kinds <= set(card.by_kind_ns)
        assert sum(card.by_kind_ns.values()) + card.idle_ns == card.wall_ns
        assert card.idle_ns < 0.2 * card.wall_ns, "what it does is told by name"
    training, generation = length(trains, "train"), length(generates, "generate")
    assert sum(length(generates, "wait_weights")) > sum(training[:-1]), "until the step is trained"
    assert sum(length(trains, "wait_data")) > sum(generation), "until samples are generated"
