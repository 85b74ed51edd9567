from .config import DataConfig as DataConfig
from .rows import Row as Row
from .source import Prompt as Prompt
from .source import PromptSource as PromptSource
from .source import solution_ids as solution_ids
from .template import ChatTemplate as ChatTemplate
from .tokenizer import make_tokenizer as make_tokenizer
