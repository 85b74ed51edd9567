from .plain import PagedRows as PagedRows
from .plain import Plain as Plain
from .registry import block_tokens as block_tokens
from .registry import operators_of as operators_of
from .rows import BATCH_INVARIANT_ROWS as BATCH_INVARIANT_ROWS
from .rows import head_linear as head_linear
from .rows import linear as linear
from .rows import sigmoid as sigmoid
