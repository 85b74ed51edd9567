"""Measure how the costs of a run grow: with groups, samples, sequences, cards, prompts and steps.

    python benchmarks/growth.py --json growth.json               (about 20 minutes on two cores)
    python benchmarks/growth.py --only controller,decode         or events, queue, calls, memory
    python benchmarks/growth.py --only memory --steps 300

controller: CPU of the whole controller per group of 8 samples, at 64 to 16,384 groups a step (`growth_controller.py`).
events: of the staleness ledger and of the request buffer. queue: samples per second while 10k to 1M are held. decode:
the host's part of a decode step at 1 to 1,024 sequences (`growth_decode.py`). calls: calls of Ray in a step of a real
run. memory: of each process of a run that suspends, drafts, saves and evaluates, beside its floor, a Ray without any
work; and bytes of its folder (`growth_run.py`).

Times are CPU times. How much longer this machine computes than the reference machine (`tests/machine.py`) is measured
beside each; targets are checked for the reference machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GROUPS = (64, 256, 1024, 4096, 16384)
HELD = (10_000, 100_000, 1_000_000)
SEQUENCES = (1, 8, 64, 256, 1024)
CARDS, PROMPTS = (1, 2, 4), (16, 64, 256)
SETTLED = 100
"""Step behind which memory must not grow"""

TARGETS = {
    "controller_us_a_group": 50.0,
    "decode_us_at_64": 1000.0,
    "decode_us_a_sequence": 4.0,
    "memory_growth": 0.02,
    "calls_by_prompts": 0.0,
}
"""Upper bounds, on the reference machine"""

Figures = dict[str, Any]


def slowness() -> float:
    """Return how much longer this machine computes now than the reference machine."""
    from tests.machine import Speed

    return Speed.measure().slowness


def on_reference(measure: Callable[[], float], rounds: int = 3) -> float:
    """Return the least of several measured CPU times, in those of the reference machine."""
    return min(measure() / max(1.0, slowness()) for _ in range(rounds))


def controller(args: argparse.Namespace) -> Figures:
    from benchmarks.growth_controller import measure

    figures: Figures = {"us_a_group": {}, "queue_calls": {}}
    for staleness in (0, 1):
        for groups in GROUPS:
            measured: list[Figures] = []

            def once(groups: int = groups, staleness: int = staleness, measured: list[Figures] = measured) -> float:
                measured.append(measure(groups, staleness))
                return measured[-1]["us_a_group"]

            rounds = 3 if groups < GROUPS[-1] else 2
            name = f"s{staleness}/{groups}"
            figures["us_a_group"][name] = on_reference(once, rounds)
            figures["queue_calls"][name] = measured[-1]["queue_calls"]
            print(
                f"controller, staleness {staleness}, {groups:6} groups: {figures['us_a_group'][name]:6.0f} us a group"
            )
    figures["controller_us_a_group"] = max(figures["us_a_group"].values())
    return figures


def events(args: argparse.Namespace) -> Figures:
    from benchmarks.growth_events import measure_buffer, measure_ledger

    figures: Figures = {"ledger_events_per_s": {}, "buffer_events_per_s": {}}
    for groups in GROUPS:
        figures["ledger_events_per_s"][groups] = 1 / on_reference(lambda groups=groups: 1 / measure_ledger(groups))  # type: ignore[misc]
        figures["buffer_events_per_s"][groups] = 1 / on_reference(lambda groups=groups: 1 / measure_buffer(groups))  # type: ignore[misc]
        rates = (figures[f"{name}_events_per_s"][groups] for name in ("ledger", "buffer"))
        print("{:6} groups: ledger {:9,.0f} events/s, buffer {:9,.0f} events/s".format(groups, *rates))
    return figures


def queue(args: argparse.Namespace) -> Figures:
    from benchmarks.growth_events import measure_queue

    figures: Figures = {}
    for held in HELD:
        figures[str(held)] = measured = measure_queue(held)
        rates = ", ".join(f"{name} {measured[f'{name}_samples_per_s']:9,.0f}" for name in ("put", "get", "ack"))
        print(f"{held:9,} samples held: {rates} samples/s; {measured['bytes_per_sample']:4.0f} bytes a sample")
    return figures


def decode(args: argparse.Namespace) -> Figures:
    import torch

    from benchmarks.growth_decode import fit, make_engine, measure

    torch.set_num_threads(1)
    engine = make_engine(args.device, SEQUENCES[-1])
    us = {n: on_reference(lambda n=n: measure(engine, n, args.decode_steps)) for n in SEQUENCES}  # type: ignore[misc]
    intercept, slope = fit(us)
    for n, value in us.items():
        print(f"decode step, {n:5} sequences: {value:7.0f} us of the host")
    print(f"intercept {intercept:.0f} us, slope {slope:.2f} us a sequence")
    return {"us": us, "intercept_us": intercept, "decode_us_a_sequence": slope, "decode_us_at_64": us[64]}


def calls(args: argparse.Namespace) -> Figures:
    from benchmarks.growth_run import calls_of_a_step, run

    figures: Figures = {"by_cards": {}, "by_prompts": {}}
    with model_folder() as folder:
        for cards in CARDS:
            figures["by_cards"][cards] = calls_of_a_step(run(folder, cards=cards, prompts=PROMPTS[0], steps=4))
        for prompts in PROMPTS[1:]:
            figures["by_prompts"][prompts] = calls_of_a_step(run(folder, cards=2, prompts=prompts, steps=4))
    figures["by_prompts"] = {PROMPTS[0]: figures["by_cards"][2], **figures["by_prompts"]}
    for by in ("cards", "prompts"):
        for n, found in figures[f"by_{by}"].items():
            print(
                f"{n:4} {by:7}: {found['calls']:4.0f} calls of Ray a step, and {found['polled']:.0f} for what arrives"
            )
    numbers = [found["calls"] for found in figures["by_prompts"].values()]
    return figures | {"calls_by_prompts": max(numbers) - min(numbers)}


def memory(args: argparse.Namespace) -> Figures:
    from benchmarks.growth_run import WHOLE, growth_of_floor, growth_of_memory, idle_ray, run

    first = min(SETTLED, args.steps // 2)
    with model_folder() as folder:
        with idle_ray(folder / "idle") as record:
            steps = run(folder, cards=2, prompts=8, steps=args.steps, others=tuple(WHOLE))
        idle = [json.loads(line) for line in record.read_text().splitlines()]
    sizes = growth_of_memory(steps, first)
    print(f"mean memory of a tenth of the {len(steps)} steps, behind step {first} and at the end:")
    for name, (before, after) in sizes.items():
        over = " MISSED" * (after / before - 1 > TARGETS["memory_growth"])
        print(f"{name:30} {before / 1e6:7.1f} MB {after / 1e6:7.1f} MB {after / before - 1:+7.2%}{over}")
    floor = growth_of_floor(idle, steps, first)
    for name, (before, after) in floor.items():
        if name.split()[0] in ("gcs", "raylet"):
            print(f"{'floor: idle ' + name:30} {before / 1e6:7.1f} MB {after / 1e6:7.1f} MB {after / before - 1:+7.2%}")
    written = (steps[-1]["folder"] - steps[first - 1]["folder"]) / (len(steps) - first)
    print(f"{written:,.0f} bytes of the run's folder a step")
    growth = max(after / before - 1 for before, after in sizes.values())
    return {"bytes": sizes, "floor_bytes": floor, "folder_bytes_a_step": written, "memory_growth": growth}


def model_folder() -> Any:
    """Create a folder with a tiny model in it, removed at the end of the block."""
    from contextlib import contextmanager

    from benchmarks.stalesync_modes import make_model

    @contextmanager
    def made():
        with tempfile.TemporaryDirectory() as name:
            make_model(Path(name) / "model")
            yield Path(name)

    return made()


PARTS = {
    "controller": controller,
    "events": events,
    "queue": queue,
    "decode": decode,
    "calls": calls,
    "memory": memory,
}


def misses(figures: dict[str, Figures]) -> list[str]:
    """Return a line for each target and whether it was met, of the parts that were measured."""
    found = {name: value for part in figures.values() for name, value in part.items() if name in TARGETS}
    return [
        f"{'ok    ' if value <= TARGETS[name] else 'MISSED'} {name}: {value:.4g}, target at most {TARGETS[name]:g}"
        for name, value in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=1000, help="of the run whose memory is measured")
    parser.add_argument("--decode-steps", type=int, default=60)
    parser.add_argument(
        "--device", default="cpu", help="of `decode`: cpu (default), or a kind of fusion.npu: emulated, …"
    )
    args = parser.parse_args()
    names = list(PARTS) if args.only is None else args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    slow = slowness()
    print(f"this machine computes {slow:.2f} x as long as the reference machine")
    figures = {name: PARTS[name](args) for name in names}
    lines = misses(figures)
    print("\n".join(lines))
    if args.json:
        result = {"slowness": slow, "targets": TARGETS, "figures": figures, "checked": lines}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
