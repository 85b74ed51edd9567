"""What the chat templates of model families write, as far as conversations need it, and how models write a turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN3 = (
    "{% set ns = namespace(query=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.query and (loop.last or thought) %}"
    "{{ '<think>\n' + (thought or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n'"
    " + 'Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}"
    "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{% if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}{% endif %}"
    "<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DEEPSEEK_V3 = (
    "{% set ns = namespace(tool=false, first=true) %}<｜begin▁of▁sentence｜>"
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m.content + '<｜end▁of▁sentence｜>' }}"
    "{% set ns.tool = false %}"
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}"
    "{{ '<｜tool▁outputs▁begin｜>' if ns.first else '\n' }}{% set ns.first = false %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
    "{% if ns.tool %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{% set ns = namespace(user=-1) %}{% set silent = enable_thinking is defined and not enable_thinking %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content %}"
    "{% set said = m.content.split('</think>')[-1].strip() %}"
    "{{ '<|assistant|>\n<think>' + (thought if thought and loop.index0 > ns.user else '') + '</think>' }}"
    "{% if said %}{{ '\n' + said }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{{ '/nothink' if m.role == 'user' and silent }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{{ '\n<think></think>' if silent }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its settings, how its model writes a thought and an answer, and which tokens end a turn before which
    role of the next message."""

    name: str
    template: str
    thought: str
    answer: str
    ends: dict[str, str]
    settings: dict[str, bool] = field(default_factory=dict)

    def written(self, thought: str, answer: str) -> str:
        return (self.thought.format(thought) if thought else "") + self.answer.format(answer)


TAGGED = "<think>\n{}\n</think>\n\n"
FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", QWEN3, TAGGED, "{}", {"user": "<|im_end|>", "tool": "<|im_end|>"}),
        Family("llama3", LLAMA3, TAGGED, "{}", {"user": "<|eot_id|>", "tool": "<|eot_id|>"}),
        Family("deepseek_v3", DEEPSEEK_V3, TAGGED, "{}", dict.fromkeys(("user", "tool"), "<｜end▁of▁sentence｜>")),
        Family("glm45", GLM45, "\n<think>{}</think>", "\n{}", {"user": "<|user|>", "tool": "<|observation|>"}),
        Family(
            "glm45_silent", GLM45, "", "\n{}", {"user": "<|user|>", "tool": "<|observation|>"},
            {"enable_thinking": False},
        ),
    )
}  # fmt: skip
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>",
    "<tool_call>", "</tool_call>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|eom_id|>", "<|python_tag|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "[gMASK]", "<sop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, and pairs of line ends, as byte-pair encodings have them."""
    pairs = ["\n\n", ".\n"]
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n", *pairs])}
    core = Tokenizer(models.BPE(vocabulary, merges=[tuple(pair) for pair in pairs]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "merged_with_next"), decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[0], chat_template=template)
