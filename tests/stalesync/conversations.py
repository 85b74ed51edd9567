"""A tiny model that chats, untrained, and environments for it."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fusion.model import Mesh, ModelConfig, Transformer, save_folder
from fusion.npu import open_device
from tests.environments.templates import QWEN3

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["system", "user", "assistant", "tool", *"0123456789+-=?>", " ", "\n"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ENVIRONMENT = '''
import asyncio, hashlib, os, re, signal, time
from pathlib import Path
from fusion.environments import Turn

class Env:
    """Says a digit that depends on seed and history, three times, and pays for the digits that the model says."""

    pause_s, extra = 0.0, ""

    async def reset(self, task, seed):
        self.history, self.seed, self.turns, self.prompt = "", seed, 0, task.prompt
        return [{"role": "user", "content": task.prompt + str(seed % 10)}]

    async def step(self, message):
        self.history += message["content"] + "|"
        self.turns += 1
        await asyncio.sleep(self.pause_s)
        await self.disturb()
        digit = hashlib.sha256((self.history + str(self.seed)).encode()).digest()[0] % 10
        paid = sum(map(str.isdigit, message["content"])) / 10
        return Turn([{"role": "user", "content": str(digit) + self.extra}], done=self.turns == 3, reward=paid)

    async def disturb(self): ...

    async def close(self): ...

class Shots(Env):
    async def reset(self, task, seed):
        shot = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2>>>2"}]
        return [*shot, *await super().reset(task, seed)]

class Slow(Env):
    pause_s = 0.3

class Failing(Env):
    """Fails by the first digit of the prompt."""

    async def reset(self, task, seed):
        if task.prompt[0] == "5":
            raise RuntimeError("no such room")
        return await super().reset(task, seed)

    async def disturb(self):
        match self.prompt[0]:
            case "0":
                raise RuntimeError("broken")
            case "1":
                await asyncio.sleep(600)
            case "3":
                self.extra = str(time.time_ns())[-6:]
                if self.turns == 2:
                    raise RuntimeError("its next environment says something else")
            case "4":
                os._exit(3)

class Broken(Env):
    async def disturb(self):
        raise RuntimeError("always broken")

class Killing(Env):
    """Kills a card of the run whose logs lie beside this file, once, at the 40th step of this process."""

    pause_s, steps = 0.1, 0

    async def disturb(self):
        Killing.steps += 1
        if Killing.steps == 40:
            log = Path(__file__).parent / "run" / "logs" / "rank-2.log"
            os.kill(int(re.findall(r"process (\\d+) on", log.read_text())[-1]), signal.SIGKILL)
'''


def make_all(folder):
    """Save the model and the environments in a folder."""
    make_chatting_model(Path(folder) / "chatting")
    (Path(folder) / "env.py").write_text(ENVIRONMENT)


def make_chatting_model(folder, seed=0, *, thinks=False):
    """Save an untrained model that ends one token in twenty with the end of its turn. ``thinks``: it may also end a
    thought, which its template removes before a later message of the user."""
    vocabulary = {word: id for id, word in enumerate([*SPECIAL, *WORDS, *(("<think>", "</think>") if thinks else ())])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words = Regex("system|user|assistant|tool|</?think>|[\\s\\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    fast.chat_template = QWEN3 if thinks else TEMPLATE
    fast.save_pretrained(folder)
    shape = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "vocab_size": len(fast),
        "max_position_embeddings": 256,
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
    }
    model = Transformer(ModelConfig.from_hf(shape, "shape"), Mesh.single(), open_device("emulated"))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.08)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
    save_folder(model, folder)
