"""Fine-tuning on chats: the file becomes a model that says what its assistant says."""

from __future__ import annotations

import json
import re

import pytest

from fusion.npu import open_device
from stalesync.job.base_model import make_base_model
from stalesync.job.sft import ChatTokenizer, FineTuning, fine_tune, read_chats
from stalesync.prompts import ChatTemplate, DataConfig, make_tokenizer
from tests.helpers import tiny_checkpoint

TURNS = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "no"}]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    tokenizer = make_tokenizer(folder, chat=True)
    tiny_checkpoint(folder, vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, eos_token_id=1)
    return folder


def chats_of(tmp_path, *chats):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def test_a_model_learns_what_the_assistant_says_and_is_saved_with_its_tokenizer(tmp_path, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chats = [[*TURNS, {"role": "user", "content": str(n)}, {"role": "assistant", "content": "yes"}] for n in range(40)]
    plan = FineTuning(epochs=20, batch=12, target=0.9, lr=2e-2)
    probability = fine_tune(chats_of(tmp_path, *chats), model, tmp_path / "tuned", open_device("emulated"), plan=plan)
    assert probability >= 0.9
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    prompt = tokenizer.apply_chat_template(
        chats[3][:3], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    answer = tuned.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "yes<|end|>"


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([TURNS, TURNS[:1]], "row 1 .*: the chat has no message of the assistant"),
        ([TURNS, "text"], "row 1 .*: expected a list of messages in the field 'messages'"),
        ([TURNS, [*TURNS, {"role": "robot", "content": "x"}]], "row 1 .*: message 2: role='robot'"),
        ([[{"role": "user", "content": "7" * 30}, TURNS[1]]], "row 0 .*: 36 tokens; expected at most 20"),
        ([TURNS], "expected at least 2 chats"),
        ([], "chats.jsonl: the file is empty"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_row(tmp_path, model, rows, named):
    with pytest.raises(ValueError, match=named):
        fine_tune(
            chats_of(tmp_path, *rows),
            model,
            tmp_path / "tuned",
            open_device("emulated"),
            plan=FineTuning(max_length=20),
        )
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"batch": 0}, "batch=0: expected a whole number of at least 1"),
        ({"epochs": -1}, "epochs=-1: expected a whole number of at least 1"),
        ({"max_length": 0}, "max_length=0: expected"),
        ({"target": float("nan")}, "target=nan: expected a number above 0"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(tmp_path, model, setting, named):
    with pytest.raises(ValueError, match=named):
        fine_tune(
            chats_of(tmp_path, TURNS, TURNS), model, tmp_path / "x", open_device("emulated"), plan=FineTuning(**setting)
        )


@pytest.mark.parametrize(
    ("num_chats", "why"), [(2, "the trained model computes nan; decrease lr=1e+16"), (9, "is not finite")]
)
def test_a_model_that_no_longer_computes_numbers_is_not_saved(tmp_path, model, num_chats, why):
    plan = FineTuning(batch=1, lr=1e16)
    with pytest.raises(RuntimeError, match=re.escape(why)):
        fine_tune(
            chats_of(tmp_path, *[TURNS] * num_chats), model, tmp_path / "tuned", open_device("emulated"), plan=plan
        )
    assert not (tmp_path / "tuned").exists()


def test_a_parquet_file_teaches_the_same_as_json_lines(tmp_path, model):
    import pyarrow.parquet

    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    calls = [call, {"function": {"name": "neg", "arguments": {"b": 2}}}]
    said = [{"role": "assistant", "content": "", "tool_calls": [one]} for one in calls]
    chats = [[TURNS[0], {"role": "assistant", "content": "no"}], *([TURNS[0], turn] for turn in said)]
    written = chats_of(tmp_path, *chats)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": chat} for chat in chats]), tmp_path / "chats.parquet"
    )
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "message.content ~ (message.tool_calls | default('') | string)"
    )
    tokenize = ChatTokenizer(ChatTemplate(DataConfig(), tokenizer), tokenizer)
    plan = FineTuning()
    found = read_chats(tmp_path / "chats.parquet", tokenize, plan)
    assert found == read_chats(written, tokenize, plan) and '{"b": 2}' in tokenizer.decode(found[2].ids)
    (tmp_path / "chats.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="chats.parquet: cannot be read: "):
        read_chats(tmp_path / "chats.parquet", tokenize, plan)


def test_a_file_is_not_replaced_by_the_checkpoint(tmp_path, model):
    chats = chats_of(tmp_path, TURNS, TURNS)
    with pytest.raises(ValueError, match="chats.jsonl is a file: expected a folder"):
        fine_tune(chats, model, chats, open_device("emulated"))
    assert chats.is_file()


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, model):
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = None
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        fine_tune(chats_of(tmp_path, TURNS, TURNS), model, tmp_path / "tuned", open_device("emulated"))


@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_a_base_model_of_conversations_is_saved_with_a_chat_template(tmp_path, task):
    from transformers import AutoTokenizer

    folder, device = tmp_path / "base", open_device("emulated")
    changes = {"batch": 8, "check_every": 2, "check_prompts": 4, "hidden": 16}
    accuracy = make_base_model(task, folder, device, target=0.0, max_steps=2, **changes)
    assert 0 <= accuracy < 0.1 and (folder / "model.safetensors").is_file()
    chat = [{"role": "user", "content": "12+34="}]
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == "<|user|>12+34=<|end|>"
    with pytest.raises(RuntimeError, match=f"warm-up on {task}: accuracy .* after 2 steps, not 1.0"):
        make_base_model(task, tmp_path / "other", device, target=1.0, max_steps=2, **changes)


@pytest.mark.parametrize("tools", [[{"name": "add"}], '[{"name": "add"}]', "add", [1]])
def test_tools_of_a_row_reach_the_template_or_are_refused(tmp_path, model, tools):
    rows = [{"messages": TURNS}, {"messages": TURNS, "tools": tools}]
    (path := tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    what = "the chat template leaves out tools" if "name" in str(tools) else "tools=.*: expected a list of JSON schemas"
    with pytest.raises(ValueError, match=f"row 1 .*: {what}"):
        fine_tune(path, model, tmp_path / "tuned", open_device("emulated"))
