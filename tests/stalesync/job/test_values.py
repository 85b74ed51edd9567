"""Words of a command line: what is accepted as a value of a key, and what is said where it is not."""

from __future__ import annotations

import importlib
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from fusion.resources import SCRIPTS
from stalesync import planning
from stalesync.job.job_arguments import job_config, parse
from stalesync.job.other_names import NOTES, OTHER_NAMES
from stalesync.job.overrides import accepted, check_overrides, composed, known_keys, typed, typed_keys
from stalesync.simulator import command_line

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "recipes" / "conf"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["run.steps=1e3"], 1000),
        (["rollout.schedule.chunk_tokens=1e3"], 1000),
        (["rollout.schedule.chunk_tokens=auto"], "auto"),
        (["rollout.schedule.chunk_tokens=null"], None),
        (["run.steps=200"], 200),
        (["device.capacity_bytes=2G"], 2 << 30),
        (["device.capacity_bytes=1.5GiB"], 3 << 29),
        (["device.capacity_bytes=null"], None),
        (["device.capacity_bytes=128Mi"], 128 << 20),
        (["data.system_prompt=You add, I check."], "You add, I check."),
        (["data.system_prompt=You're right: 1+1=2"], "You're right: 1+1=2"),
        (["data.source=my set (1).jsonl"], "my set (1).jsonl"),
        (['data.system_prompt=[INST] It\'s "q", {x} \\boxed(y) \\'], '[INST] It\'s "q", {x} \\boxed(y) \\'),
        (["data.system_prompt='as Hydra has it'"], "as Hydra has it"),
        (["rollout.sampling.stop=</answer>"], ["</answer>"]),
        (["rollout.sampling.stop=\n"], ["\n"]),
        (["run.profile_steps=3"], [3]),
        (["run.loggers=wandb"], ["wandb"]),
        (["run.loggers=wandb,tensorboard"], ["wandb", "tensorboard"]),
        (["run.loggers=[]"], []),
        (["training.betas=[0.9,0.99]"], [0.9, 0.99]),
        (["eval.files=my/file-1.jsonl"], ["my/file-1.jsonl"]),
        (["rollout.sampling.stop='a b'"], None),
        (["training.lr=1e-4"], 1e-4),
        (["rollout.engine.prefix_cache=false"], False),
    ],
)
def test_a_value_may_be_written_as_one_would(words, value):
    if value is None and "stop" in words[0]:
        words, value = ["rollout.sampling.stop=['a b']"], ["a b"]
    config = composed(CONF, [*accepted(words, CONF), "data=addition"])
    for name in words[0].split("=")[0].split("."):
        config = getattr(config, name)
    assert config == value


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.name=runs/mine", "expected one folder name, without / and not starting with a dot"),
        ("run.eval_prompts=2147483648", "expected a whole number in [0, 1000000]"),
        ("data.prompts_per_step=1e308", "expected a whole number in [1, 1000000]"),
        ("algorithm.group_size=2147483648", "expected a whole number in [1, 100000]"),
        ("algorithm.clip_high=1e300", "expected a number in [0, 1e+30]"),
        ("training.lora.rank=1e308", "expected a whole number in [0, 65536]"),
        ("stalesync.max_staleness=9223372036854775808", "expected a whole number in [0, 100000]"),
        ("fusion.bucket_bytes=9223372036854775808", "expected a whole number in [1024, 1099511627776]"),
        ("device.capacity_bytes=9223372036854775808", "expected a whole number in [1, 1125899906842624], or null"),
        ("reward.workers=1e308", "expected a whole number in [1, 4096]"),
        ("reward.memory_mib=9223372036854775808", "expected a whole number in [128, 1073741824], or null"),
        ("reward.time_limit_s=1e7", "expected a number in (0, 1e+06]"),
        ("environment.step_timeout_s=1e9", "expected a number in (0, 1e+06]"),
        ("environment.memory_mib=null", "=null: expected 4096 (the default) with environment.name"),
        ("fusion.double_buffer=true", "=true: expected false (the default)"),
        ("reward.terms=[null]", "[0]=null: expected a reward"),
        ("queue.spill=/dev/null", "expected a folder, which may not exist yet"),
    ],
)
def test_a_value_that_would_end_the_run_is_refused_in_the_words_of_the_command_line(word, message):
    config = composed(CONF, accepted([word], CONF))
    with pytest.raises(ValueError, match=rf"^{re.escape(word.partition('=')[0])}.*{re.escape(message)}"):
        config.validate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=ppo"], "algorithm=ppo: expected one of dapo, dr_grpo, grpo, gspo, reinforce_plus_plus, rloo"),
        (["device=gpu"], "device=gpu: expected one of auto, cuda, emulated, npu, paced"),
        (["run.steps=ten"], "run.steps=ten: expected a whole number"),
        (["run.steps=1.5"], "run.steps=1.5: expected a whole number"),
        (["run.steps=inf"], "run.steps=inf: expected a whole number"),
        (["device.capacity_bytes=2X"], "device.capacity_bytes=2X: expected a whole number or one with K, M, G or T"),
        (["training.lr=fast"], "training.lr=fast: expected a number"),
        (["rollout.engine.prefix_cache=perhaps"], "rollout.engine.prefix_cache=perhaps: expected true or false"),
        (["--lr", "1e-4"], "'--lr': expected KEY=VALUE; write training.lr=1e-4"),
        (["--lr=1e-4"], "'--lr=1e-4': expected KEY=VALUE; write training.lr=1e-4"),
        (["--num-generations", "8"], "'--num-generations': expected KEY=VALUE; write algorithm.group_size=8"),
        (["--algorithm.group_size", "8"], "expected KEY=VALUE; write algorithm.group_size=8"),
        (["num_generations=8"], "unknown key 'num_generations'; it is algorithm.group_size here"),
        (["actor_rollout_ref.rollout.n=8"], "'actor_rollout_ref.rollout.n'; it is algorithm.group_size here"),
        (["trainer.save_freq=5"], "unknown key 'trainer.save_freq'; it is run.save_every here"),
        (["num_iterations=2"], "unknown key 'num_iterations'; there is none like it here"),
        (["group_size=8"], "unknown key 'group_size'; it is algorithm.group_size here"),
        (["training.learning_rate=1"], "unknown key 'training.learning_rate'; it is training.lr here"),
    ],
)
def test_what_is_not_accepted_is_refused_in_one_line_with_what_is(words, message):
    with pytest.raises(ValueError) as caught:
        accepted(words, CONF)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "word", ["model.path=${", "training.betas=[0.9", "eval.files=[{path:a.jsonl]", "rollout.sampling.top_k=[1]"]
)
def test_what_hydra_itself_refuses_is_one_line(word):
    with pytest.raises(ValueError) as caught:
        composed(CONF, accepted([word], CONF))
    assert "\n" not in str(caught.value) and "HYDRA_FULL_ERROR" not in str(caught.value)


COMMANDS = {  # the words before those of a job
    "plan": ["model=qwen3_30b_a3b", "cluster=a3_16"],
    "simulate": ["model=qwen3_30b_a3b", "cluster.hardware=h100", "cluster.npus=16"],
    "check": [],
    "evaluate": ["{run}"],
    "control": ["{run}"],
}
WRONG = {
    "--lr 1e-4": "'--lr': expected KEY=VALUE; write training.lr=1e-4",
    "max_num_seqs=8": "unknown key 'max_num_seqs'; it is rollout.engine.max_seqs here",
    "rollout.engine.max_seqs=few": "rollout.engine.max_seqs=few: expected a whole number",
    "rollout.engine.max_seqs=1.5": "rollout.engine.max_seqs=1.5: expected a whole number",
    "-m": "'-m'",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_what_train_does_in_a_line_with_status_2(command, wrong, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("{}")
    words = [word.format(run=tmp_path) for word in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", [f"{command}.py", *words, *wrong.split()])
    monkeypatch.setattr(
        signal, "signal", lambda *_: None
    )  # scripts ignore signals at their end, which is this process's
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / f"{command}.py"), run_name="__main__")
    *usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage[0].startswith("usage: ") and len(usage) <= 2
    assert "error: " in error and WRONG[wrong] in error


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_plan_and_simulate_read_values_as_train_does(command):
    known = {"plan": planning, "simulate": command_line}[command]
    words = (
        "cluster.npus=1e2 rollout.engine.max_seqs=1e2 fusion.bucket_bytes=2G rollout.sampling.stop=end --job".split()
    )
    parsed = parse(words, options=known.OPTIONS, flags=[], conf=CONF)
    assert parsed.options == {"cluster.npus": "100"}
    config, _ = job_config(parsed, CONF, command=command, defaults=())
    assert (config.rollout.engine.max_seqs, config.fusion.bucket_bytes, config.rollout.sampling.stop) == (
        100,
        2 << 30,
        ["end"],
    )


def test_control_reads_values_as_train_does(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["control.py", str(tmp_path), "rollout.engine.max_seqs=1e1", "engines=all"])
    importlib.import_module("scripts.control").main()
    printed = capsys.readouterr().out
    assert "rollout.engine.max_seqs=10" in printed and "no run of this machine has the folder" in printed


def test_hydras_own_options_pass():
    check_overrides(["--cfg", "job", "--resolve", "-m", "--info=all"])


@given(st.text(st.characters(codec="utf-8", exclude_characters="$\x00"), min_size=1))
@example("1e3")
@example("\n")
@example("FALSE")
@example("\\\\' \\\"\\")
def test_a_text_keeps_its_characters(text):
    in_quotes = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if text.lower() not in ("null", "none") and not in_quotes:
        word = f"data.system_prompt={typed('data.system_prompt', text, str | None)}"
        assert OverridesParser.create().parse_override(word).value() == text


@given(st.sampled_from(sorted(typed_keys())), st.text(st.characters(codec="ascii"), max_size=6))
def test_any_text_is_a_value_or_refused_by_key(key, text):
    try:
        found = typed(key, text, typed_keys()[key])
    except ValueError as error:
        assert str(error).startswith(f"{key}={text}: expected ")
    else:
        assert isinstance(found, str)


@given(st.integers(-(10**12), 10**12))
def test_a_whole_number_keeps_its_value(number):
    assert int(typed("run.seed", str(number), int)) == number
    assert int(typed("run.seed", f"{number}.0", int)) == number


def test_every_key_has_a_type():
    assert list(typed_keys()) == known_keys()


def named_in_docs():
    """What the tables of docs/coming_from.md say, as `OTHER_NAMES` does."""
    names = {}
    for line in (ROOT / "docs" / "coming_from.md").read_text().splitlines():
        if not line.startswith("| `") or "`GRPOConfig`" in line:
            continue
        first, here = line.strip("| ").split(" | ")[:2]
        theirs = []
        for name in re.findall(r"`([^`]+)`", first):
            theirs.append((theirs[-1].rpartition(".")[0] + name if name.startswith(".") else name).split("=")[0])
        ours = re.findall(r"`(\w+\.[\w.]+(?:=[^`]*)?)`", here)
        paired = len(theirs) == len(ours) and not any("=" in one for one in ours)
        for number, name in enumerate(theirs):
            if ours != [name]:
                names.setdefault(name, ours[number] if paired else " and ".join(ours))
    return names


def test_hints_are_those_of_the_tables_in_the_docs():
    assert named_in_docs() == OTHER_NAMES and len(OTHER_NAMES) > 60
    for here in filter(None, OTHER_NAMES.values()):
        for one in here.split(" and "):
            assert one.split("=")[0] in known_keys(), one


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("data.truncation", "it is data.long_prompts here (refuse or skip: no prompt is cut)"),
        ("algorithm.gamma", "there is none like it here (docs/coming_from.md)"),
        ("use_vllm", "it is rollout.backend=vllm here"),
    ],
)
def test_a_setting_that_is_another_one_here_is_answered_with_it(key, hint):
    with pytest.raises(ValueError) as refused:
        check_overrides([f"{key}=1"])
    assert str(refused.value) == f"unknown key {key!r}; {hint}"


@pytest.mark.parametrize(
    "foreign",
    ["critic.optim.lr", "reward_model.model.path", "actor_rollout_ref.actor.use_dynamic_bsz", "critic.custom.name"],
)
def test_a_key_of_another_group_of_verl_is_not_answered_with_one_that_only_ends_alike(foreign):
    with pytest.raises(ValueError, match=f"^unknown key '{foreign}'; docs/coming_from.md has what") as refused:
        check_overrides([f"{foreign}=1"])
    assert "it is" not in str(refused.value) and "did you mean" not in str(refused.value)


def test_all_unknown_keys_of_a_command_are_named_at_once_with_what_their_values_mean_here():
    theirs = ["trainer.nnodes=2", "run.steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=256", "run.nmae=x"]
    with pytest.raises(ValueError) as refused:
        check_overrides(theirs)
    assert str(refused.value).splitlines() == [
        "unknown key 'trainer.nnodes'; it is cluster.npus here (cards of all nodes together)",
        "unknown key 'actor_rollout_ref.actor.ppo_mini_batch_size'; it is algorithm.minibatches here"
        " (the number of minibatches, not their size)",
        "unknown key 'run.nmae'; did you mean 'run.name'?",
    ]
    page = (ROOT / "docs" / "coming_from.md").read_text()
    for key, note in NOTES.items():
        assert f"`{key}` | {note} |" in page
