"""What is loaded with the cost model, and what is loaded without it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import machine

ROOT = Path(__file__).resolve().parents[2]


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = machine.run([sys.executable, "-c", code], timeout_s=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_neither_a_worker_that_is_not_paced_nor_a_controller_loads_the_cost_model():
    worker = "fusion.colocate.worker, fusion.colocate.parts"
    controller = "stalesync.cards.cards, stalesync.loop.controller, stalesync.job.config"
    assert not {name for name in loaded_by(f"import {worker}, {controller}") if name.startswith("fusion.costmodel")}


def test_the_cost_model_loads_neither_torch_nor_ray_nor_what_acts():
    """Nor the rooms it may not import: plans are pure."""
    loaded = loaded_by("import fusion.costmodel.pace, fusion.costmodel.report")
    others = (
        "fusion.training",
        "fusion.inference",
        "fusion.offload",
        "fusion.rollout",
        "fusion.colocate",
        "fusion.rewards",
    )
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "ray", "stalesync", "distqueue")}
    assert not {name for name in loaded if name.startswith(others)}
