"""`scripts/simulate.py`: what it accepts and refuses, and what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stalesync.job.config import Config
from stalesync.simulator.cluster import Case
from stalesync.simulator.command_line import answer, cases_of
from stalesync.simulator.report import linearity
from tests import machine

ROOT = Path(__file__).resolve().parents[3]
SMALL = """model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=8 run.steps=4 data.prompts_per_step=16
data.max_prompt_length=64 algorithm.group_size=4 rollout.max_response_length=512
rollout.sampling.forced_median=64""".split()


def outcome(tmp_path, *arguments):
    answer([*SMALL, "--json", str(tmp_path / "out.json"), *arguments], ROOT / "recipes")
    return json.loads((tmp_path / "out.json").read_text())


def test_every_combination_is_simulated_and_printed(tmp_path, capsys):
    png = tmp_path / "plot.png"
    found = outcome(tmp_path, "fusion=colocated,hybrid", "stalesync.max_staleness=0,1", f"--png={png}")
    rows = found["rows"]
    assert [(row["deployment"], row["max_staleness"], row["supernodes"]) for row in rows] == [
        (deployment, bound, 1) for deployment in ("colocated", "hybrid") for bound in (0, 1)
    ]
    for row in rows:
        assert 0 < row["tokens_per_s"] <= row["bound_tokens_per_s"] and 0 < row["utilisation"] <= 1
        assert sum(row["lost"].values()) + row["utilisation"] == pytest.approx(1)
        assert row["max_lag"] <= row["max_staleness"] and row["linearity"] == 1
        assert row["limit"] in row["lost"]
    assert rows[1]["tokens_per_s"] > rows[0]["tokens_per_s"]
    out = capsys.readouterr().out
    assert "linearity" in out and "85%" in out and "91%" in out, "published anchors are printed beside"
    assert png.read_bytes().startswith(b"\x89PNG")


def test_predicted_rates_of_a_die_are_printed_beside_published_ones(tmp_path, capsys):
    job = ["model=qwen3_30b_a3b", "cluster.hardware=h100", "cluster.npus=16", "fusion.offload=stream"]
    found = outcome(tmp_path, *job, "fusion=colocated,separate")
    for deployment in ("colocated", "separate"):
        rates = found["rates"][deployment]
        assert rates.keys() == {"decode", "train"} and all(rate["tokens_per_s"] > 0 for rate in rates.values())
    assert {one["system"] for one in found["published_rates"]} == {"vLLM", "Megatron-Bridge 25.11", "NeMo AutoModel"}
    out = capsys.readouterr().out
    assert "Tokens a second of a die" in out and "github.com/vllm-project" in out, "with what is assumed"


def test_the_same_seed_gives_the_same_figures_and_a_trace_its_lengths(tmp_path):
    assert outcome(tmp_path)["rows"] == outcome(tmp_path)["rows"] != outcome(tmp_path, "run.seed=1")["rows"]
    trace = tmp_path / "groups.jsonl"
    trace.write_text("".join(json.dumps({"group": f"g{n}", "response_tokens": [9] * 4}) + "\n" for n in range(16)))
    even = outcome(tmp_path, f"trace={trace}")
    assert even["rows"][0]["tokens_per_s"] * even["rows"][0]["step_s"] == pytest.approx(16 * 4 * (64 + 9))


def test_conversations_are_simulated_and_wrong_ones_are_refused_by_key(tmp_path, capsys):
    arguments = ["turns=3", "observation_tokens=10", "rollout.kv_pool.suspended=keep"]
    (fast,), (slow,) = (outcome(tmp_path, *arguments, f"latency_s={seconds}")["rows"] for seconds in (0, 9))
    assert slow["step_s"] > fast["step_s"] + 3 * 9 * 0.9, "each turn waits for its environment"
    assert "3 turns, observations of 10 tokens, latency of median 9 s" in capsys.readouterr().out
    for wrong in ("turns=0", "observation_tokens=1.5", "latency_s=x", "latency_spread=-1", "branch_share=1.5"):
        with pytest.raises(ValueError, match=wrong):
            outcome(tmp_path, wrong)
    with pytest.raises(ValueError, match="turns=30: with observation_tokens=20 they do not fit"):
        outcome(tmp_path, "turns=30", "observation_tokens=20")


def test_rewards_that_take_time_are_simulated_and_printed_and_refused_where_they_have_no_effect(tmp_path, capsys):
    (free,) = outcome(tmp_path)["rows"]
    assert "rewards:" not in capsys.readouterr().out
    found = outcome(tmp_path, "reward.latency_s=8", "reward.workers=4")
    (slow,) = found["rows"]
    assert slow["step_s"] > 64 * 8 / 4 > free["step_s"], "64 samples a step in four processes"
    assert "rewards: 8 s a sample (reward.latency_s), 4 processes in all" in capsys.readouterr().out
    assert (found["config"]["reward"]["latency_s"], found["config"]["reward"]["workers"]) == (8, 4)
    for wrong in ("reward.latency_s=-1", "reward.workers=0"):
        with pytest.raises(ValueError, match=wrong):
            outcome(tmp_path, wrong)
    for other in ("reward.model=judge", "reward.name=environment"):
        with pytest.raises(ValueError, match=f"reward.latency_s=1.0: expected 0.0 .* with {other};"):
            outcome(tmp_path, "reward.latency_s=1", other)


@pytest.mark.extended
def test_more_supernodes_do_more_and_send_weights_between_them(tmp_path):
    arguments = """model=pangu_718b cluster=cloudmatrix384 supernodes=1,2 run.steps=3 data.prompts_per_step=96
    algorithm.group_size=4 rollout.max_response_length=512 rollout.sampling.forced_median=128 train=tp8pp8ep32
    infer=tp8ep256"""
    answer([*arguments.split(), "--json", str(tmp_path / "out.json")], ROOT / "recipes")
    one, two = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert one["dies"] == 768 and two["dies"] == 1536
    assert 0.8 < two["linearity"] < 1.1 and two["tokens_per_s"] > 1.6 * one["tokens_per_s"]
    assert one["weights_network_gb"] == 0 < two["weights_network_gb"]
    answer([*arguments.split(), "network_gb_s=0.5", "--json", str(tmp_path / "slow.json")], ROOT / "recipes")
    assert json.loads((tmp_path / "slow.json").read_text())["rows"][1]["switch_s"] > two["switch_s"]
    answer([*arguments.split(), "scaling=strong", "--json", str(tmp_path / "strong.json")], ROOT / "recipes")
    assert json.loads((tmp_path / "strong.json").read_text())["rows"][1]["linearity"] < two["linearity"]
    assert two["controller_s"] > 1.5 * one["controller_s"], "one process calls twice as many cards"


def test_linearity_needs_one_supernode():
    class Fast:
        tokens_per_s = 30.0

    class Slow:
        tokens_per_s = 10.0

    one, four, other = Case(1, "colocated", 0), Case(4, "colocated", 0), Case(4, "colocated", 1)
    outcomes = {one: Slow(), four: Fast(), other: Fast()}
    assert linearity(outcomes, four) == 0.75 and linearity(outcomes, other) is None


def test_linearity_with_staleness_needs_enough_steps():
    class Measured:
        tokens_per_s, steps, gradients_network_gb = 10.0, 2, 0.0

    class Enough(Measured):
        steps = 5

    one, four = Case(1, "colocated", 1), Case(4, "colocated", 1)
    assert linearity({one: Measured(), four: Measured()}, four) is None
    assert linearity({one: Enough(), four: Enough()}, four) == 0.25


def test_speed_with_staleness_is_stated_with_a_reservation_below_five_turns(tmp_path, capsys):
    def reservations(steps):
        found = outcome(tmp_path, f"run.steps={steps}", "stalesync.max_staleness=0,1")["assumptions"]
        return [line for line in found if "too many tokens/s" in line]

    assert reservations(13) == []
    expected = "colocated, staleness 1, 1 supernodes: 9 measured steps may state too many tokens/s: run.steps=13"
    assert reservations(12) == [expected] and expected in capsys.readouterr().out


def test_assumptions_of_linearity_are_printed_and_written(tmp_path, capsys):
    found = outcome(tmp_path, "slow_share=0.5", "slow_by=0.1,0.2", "scaling=strong")
    (row,) = found["rows"]
    assert row["lost"]["slow dies"] > 0 and row["tokens_per_s"] < outcome(tmp_path)["rows"][0]["tokens_per_s"]
    shown = capsys.readouterr().out
    assert "limits speed   limits linearity" in shown, "the table fits"
    for words in ("strong scaling", "50.00% of the dies slow by 10% to 20%", "GB/s a die between supernodes"):
        assert words in shown and any(words in line for line in found["assumptions"])


def test_cases_are_all_combinations_once():
    swept = {"supernodes": "4,1,4", "fusion": "hybrid,colocated", "stalesync.max_staleness": "1,0"}
    assert cases_of(swept, Config()) == [
        Case(count, name, bound) for name in ("hybrid", "colocated") for bound in (0, 1) for count in (1, 4)
    ]


@pytest.mark.parametrize(
    ("system", "stated"),
    [
        ("sync", "fusion=separate rollout.schedule.order=fifo"),
        ("all", "fusion=hybrid stalesync.max_staleness=1 rollout.kv_pool.suspended=pool rollout.drafts.source=both"),
        ("rhyme", "stalesync.max_staleness=1 rollout.schedule.order=histopipe rollout.drafts.source=history"),
        ("rlfusion fusion=full", "fusion.deployment=full stalesync.max_staleness=1"),
    ],
)
def test_a_system_is_simulated_with_its_deployment_and_bound(tmp_path, system, stated):
    rows = outcome(tmp_path, *f"system={system}".split())["rows"]
    assert len(rows) == 1 and rows == outcome(tmp_path, *stated.split())["rows"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("clutser=cloudmatrix384", "unknown argument 'clutser=cloudmatrix384'; did you mean cluster=?"),
        ("zzzz=1", "unknown argument 'zzzz=1'; expected one of model, model.path, cluster, "),
        (
            "rollout.drafts.source=siblings rollout.drafts.tree=4",
            "rollout.drafts.tree=4: expected null, as simulate.py does not model this key",
        ),
        ("rollout.schedule.order=histopipe", "rollout.schedule.order=histopipe: expected another one with stalesync."),
        ("fusion=shared", "fusion='shared': expected some of separate, colocated, full, hybrid"),
        ("supernodes=0", "supernodes=0: expected whole numbers of at least 1"),
        ("stalesync.max_staleness=one", "stalesync.max_staleness=one: expected whole numbers of at least 0"),
        ("supernodes=2", "supernodes=2: cluster.npus=8 dies of ascend_910c, expected 768, the dies of one"),
        ("texts=nowhere", "texts=nowhere: expected rollout.drafts.source=siblings, history or both"),
        ("rollout.drafts.source=both texts=nowhere", "texts=nowhere: expected JSON Lines with prompt and response"),
        ("slow_share=2", "slow_share=2: expected a share of the dies, at most 1"),
        ("slow_by=0.3,0.1", "slow_by=0.3,0.1: expected one share, or the least and the most"),
        ("network_gb_s=0", "network_gb_s=0: expected more than 0, at most 25"),
        ("scaling=none", "scaling='none': expected one of weak, strong"),
        ("run.steps=1", "run.steps=1: stalesync.max_staleness=0 needs at least 2"),
        (
            "rollout.sampling.forced_spread=[1,1,2]",
            "rollout.sampling.forced_spread=[1.0, 1.0, 2.0]: expected two standard deviations",
        ),
        ("rollout.engine.max_seqs=0", "rollout.engine.max_seqs=0: expected"),
        ("train=tp7", "train='tp7'"),
        ("infer=tp3", "infer='tp3'"),
        ("trace=nowhere", "trace=nowhere: cannot be read"),
        ("algorithm.minibatches=3", "algorithm.minibatches=3 does not divide data.prompts_per_step=16"),
        ("--json", "--json needs a path"),
        ("--png=-", "--png needs a path"),
        ("model=gpt", "model='gpt': expected one of"),
        ("fusion.infer_cards=8 fusion=hybrid", "fusion.infer_cards=8: expected fewer than cluster.npus=8"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error):
    with pytest.raises(ValueError) as refused:
        answer([*SMALL, *arguments.split()], ROOT / "recipes")
    assert str(refused.value).startswith(error)


def test_the_simulator_loads_neither_torch_nor_ray():
    code = "import sys, stalesync.simulator.command_line\nprint(sorted({'torch', 'ray', 'PIL'} & set(sys.modules)))"
    done = machine.run([sys.executable, "-c", code], timeout_s=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
