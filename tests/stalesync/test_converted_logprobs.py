"""What transformers computes on a converted checkpoint is what the run's own engine and trainer have computed."""

import pytest
import torch

from tests.stalesync.runs import SMALL, rows_of
from tests.warm import launcher

pytestmark = pytest.mark.extended


def test_log_probabilities_on_a_converted_checkpoint_are_those_of_the_run(base, tmp_path, luck):
    """The base is trained by supervision; step 2 samples from the weights that step 1 of RL has saved."""
    from transformers import AutoModelForCausalLM

    script, saved = launcher().session(), tmp_path / "run" / "checkpoints" / "step-1"
    options = [*SMALL, luck, "run.steps=2", "run.save_every=1", "training.lr=0.01", "rollout.sampling.temperature=1"]
    record = ["tests/stalesync/recorded_run.py", str(tmp_path), f"model.path={base}", f"run.dir={tmp_path}", *options]
    for command in (record, ["scripts/convert.py", str(saved), str(tmp_path / "converted")]):
        done = script.run(command, 180)
        assert done.returncode == 0, done.stdout + done.stderr
    assert rows_of(tmp_path / "run")[1]["training/rollout_logprobs_diff_p99"] < 1e-4, "trainer and engine"
    sampled = torch.load(tmp_path / "2.pt")["columns"]
    assert len(sampled["prompt"]) == 32
    errors = {}
    for name, folder in (("base", base), ("converted", tmp_path / "converted")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        errors[name] = max(
            error_of(model, {field: sampled[field][id] for field in sampled}) for id in sampled["prompt"]
        )
    assert errors["converted"] < 1e-4 and errors["base"] > 1e-3, errors


@torch.no_grad()
def error_of(model, row):
    """The largest difference of a sample's log-probabilities from those of ``model``."""
    ids = torch.cat([row["prompt"], row["response"]]).long()
    logits = model(ids[None]).logits[0, len(row["prompt"]) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, row["response"].long()[:, None])[:, 0]
    return float((logprobs - row["behaviour_logprobs"]).abs().max())
