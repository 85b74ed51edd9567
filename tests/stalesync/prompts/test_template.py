"""How a tokenizer and its chat template frame a response: end tokens, prefilled text, the settings of `data`."""

import json
import shutil
import signal
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fusion.model import ModelConfig
from fusion.resources import RECIPES
from stalesync.job.config import Config
from stalesync.job.overrides import composed
from stalesync.prepare import worker_spec
from stalesync.prompts import ChatTemplate, DataConfig, PromptSource
from tests import machine
from tests.helpers import tiny_checkpoint

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML = TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
BARE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of(template=None, *, appends=""):
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    if appends:
        core.post_processor = processors.TemplateProcessing(
            appends, special_tokens=[*zip(SPECIAL, range(len(SPECIAL)), strict=True)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:], chat_template=template
    )


@pytest.mark.parametrize(
    ("template", "kwargs", "prefill"),
    [
        (CHATML, {}, ""),
        (THINKING, {}, "<think>\n"),
        (QWEN3, {}, ""),
        (QWEN3, {"enable_thinking": True}, ""),
        (QWEN3, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        (TURNS + "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}", {}, ""),  # another form of the header
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            {},
            "",
        ),
        (TURNS, {}, ""),
    ],
)
def test_a_template_s_frame_of_a_response(template, kwargs, prefill):
    tokenizer = tokenizer_of(template)
    found = ChatTemplate(DataConfig(chat_template_kwargs=kwargs), tokenizer)
    assert (found.prefill, found.turn_end) == (prefill, 2)
    text = found.render("hi")
    assert text.endswith(prefill) and found.prefill_of(text) == prefill
    assert [tokenizer.decode(ids) for ids in found.tokenize([text])] == [text]
    lines = "\n".join(found.describe((0,)))
    assert "ends a turn with <|im_end|>, the model with <|endoftext|>: all end" in lines
    assert (f"begins every response with {prefill!r}" in lines) == bool(prefill)
    assert "all end" not in "\n".join(found.describe((0, 2)))


def test_a_template_without_an_end_of_turn_or_that_refuses_a_lone_answer_has_none():
    open_ended = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    refusing = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    for template in (open_ended, refusing, None):
        found = ChatTemplate(DataConfig(), tokenizer_of(template))
        assert (found.turn_end, found.prefill, found.describe((0,))) == (None, "", [])


@pytest.mark.parametrize("choice", ["auto", "never"])
@pytest.mark.parametrize(
    ("begin", "appended"), [("", "<|endoftext|>"), ("<|im_start|> ", "<|im_end|>"), ("", "<|im_end|> <|endoftext|>")]
)
def test_tokens_that_the_tokenizer_appends_do_not_end_a_prompt(choice, begin, appended):
    tokenizer = tokenizer_of(CHATML if choice == "never" else None, appends=f"{begin}$A {appended}")
    assert tokenizer.decode(tokenizer("12")["input_ids"][-1]) in appended
    source = PromptSource(DataConfig("addition", chat_template=choice), tokenizer, seed=0)
    assert all(tokenizer.decode(prompt.ids) == begin.strip() + prompt.text for prompt in source.next(100))
    assert source.template.describe((0,)) == [f"the tokenizer appends {appended} to a text: removed from prompts"]
    ends_itself = tokenizer_of()("1<|endoftext|>")["input_ids"]
    assert ChatTemplate(DataConfig(), tokenizer_of()).tokenize(["1<|endoftext|>"]) == [ends_itself]


def test_both_ends_stop_the_engine_and_are_taken_from_the_text(tmp_path):
    tiny_checkpoint(tmp_path, experts=False, vocab_size=128, eos_token_id=0)
    for template, choice, ends in ((CHATML, "auto", (0, 2)), (CHATML, "never", (0,)), (None, "auto", (0,))):
        tokenizer = tokenizer_of(template)
        tokenizer.save_pretrained(tmp_path)
        config = Config()
        config.model.path, config.data.chat_template = str(tmp_path), choice
        config = config.resolved()
        spec = worker_spec(config, ModelConfig.from_hf(tmp_path), tokenizer)
        # `Generation` passes them to the engines as stop tokens.
        assert spec.detokenizer.end_token_ids == ends
        # The model that is trained has them, so that its exports name them.
        assert spec.policy().eos_token_ids == ends
        shutil.rmtree(tmp_path / "chat_template.jinja", ignore_errors=True)


def rows_of(tmp_path, *prompts):
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": q, "a": 1}) + "\n" for q in prompts))
    return {"source": str(file), "prompt_field": "q", "answer_field": "a"}


def test_a_system_prompt_is_put_before_chats_without_one(tmp_path):
    system, user = {"role": "system", "content": "own"}, {"role": "user", "content": "hi"}
    config = DataConfig(system_prompt="be brief", **rows_of(tmp_path, "hi", [user], [system, user]))
    prompts = {p.id: p for p in PromptSource(config, tokenizer_of(THINKING), seed=0).next(3)}
    text = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    decoded = [tokenizer_of().decode(prompts[f"e0-{row}"].ids) for row in range(3)]
    assert decoded == [text.format("be brief")] * 2 + [text.format("own")]
    assert prompts["e0-0"].text == "hi" and {p.prefill for p in prompts.values()} == {"<think>\n"}


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        (None, {"system_prompt": "x"}, "data.system_prompt needs a tokenizer with a chat template"),
        (CHATML, {"system_prompt": "x", "chat_template": "never"}, "data.system_prompt needs"),
        (None, {"chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs needs a tokenizer with a chat template"),
        (
            QWEN3,
            {"chat_template_kwargs": {"enable_think": 1}},
            "not read 'enable_think'; it reads enable_thinking",
        ),
        (CHATML, {"chat_template_kwargs": {"messages": []}}, "does not read 'messages'; it reads no such name"),
        (CHATML + "{# depth #}", {"chat_template_kwargs": {"depth": 1}}, "does not read 'depth'"),
        ("{{ messages[-1].content }}", {"system_prompt": "x"}, "data.system_prompt: the chat template leaves out"),
    ],
)
def test_settings_that_the_template_does_not_read_are_refused(template, changes, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(DataConfig(**changes), tokenizer_of(template))


@pytest.mark.parametrize(
    ("key", "value"), [("chat_template_kwargs", [1]), ("chat_template_kwargs", {1: 2}), ("system_prompt", " ")]
)
def test_values_that_are_not_accepted_are_refused_by_key(key, value):
    with pytest.raises(ValueError, match=f"data.{key}="):
        DataConfig(**{key: value}).validate()


def test_a_mapping_is_set_on_the_command_line():
    overrides = ["data=addition", "data.chat_template_kwargs={enable_thinking: false, depth: {a: [1]}}"]
    config = composed(RECIPES / "conf", overrides)
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "depth": {"a": [1]}}
    config.data.validate()


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (ENDLESS, "takes more than 0.5 s of processor time for one prompt"),
        ("{% if messages[0].content == '7' %}" + ENDLESS + "{% endif %}" + CHATML, "takes more than 0.5 s"),
        (CHATML + "{{ 'x' * 20000000 }}", "writes 20,0.* characters for one prompt"),
    ],
    ids=["always", "of one row", "large"],
)
def test_an_endless_template_is_refused_within_a_second(tmp_path, template, what):
    rows = [json.dumps({"prompt": str(number), "answer": "1"}) + "\n" for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    tokenizer = tokenizer_of(template)
    tokenizer_of(CHATML).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)  # imports jinja
    before, start_s = signal.getsignal(signal.SIGVTALRM), time.monotonic()
    with pytest.raises(ValueError, match=rf"model.path: the chat template \(chat_template of the tokenizer\) {what}"):
        PromptSource(DataConfig(source=str(tmp_path / "rows.jsonl"), bad_rows="skip"), tokenizer, 0)
    assert machine.within(time.monotonic() - start_s, 1)
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
