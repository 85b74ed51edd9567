"""Read how the matrices of a checkpoint are quantized from `quantization_config` of its `config.json`. Pure.

Supported are float8 (e4m3) matrices with one float32 scale per block (DeepSeek-V3, arXiv 2412.19437, section 3.3),
which are dequantized while they are read:

    NAME             F8_E4M3 [R, C]                     element (r, c) of the matrix =
    NAME_scale_inv   F32 [⌈R / rows⌉, ⌈C / columns⌉]      NAME[r, c] · NAME_scale_inv[r // rows, c // columns]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion.model.hf_fields import Fields

FIELD = "quantization_config"
DEFAULT_BLOCK = (128, 128)

ONLY: Mapping[str, tuple[Any, ...]] = {
    f"{FIELD}.quant_method": ("fp8",),
    f"{FIELD}.fmt": ("e4m3",),
    f"{FIELD}.activation_scheme": ("dynamic",),
    f"{FIELD}.expert_dtype": ("fp8",),
}
"""Fields of which only these values are implemented."""

INERT = frozenset(
    f"{FIELD}.{name}"
    for name in ("modules_to_not_convert", "ignored_layers", "modules_to_convert", "scale_fmt", "dequantize")
)
"""Fields that change nothing here: the element types of a tensor and of its scales are read from the files."""


@dataclass(frozen=True)
class BlockScales:
    """The size of the blocks that share a scale, in elements of the matrix."""

    rows: int
    columns: int

    def scales(self, region: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Return the box of the scales that the box ``region`` of the matrix needs."""
        blocks = zip(region, (self.rows, self.columns), strict=True)
        return tuple((start // size, -(-stop // size)) for (start, stop), size in blocks)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix of this shape."""
        return tuple(stop for _, stop in self.scales(tuple((0, size) for size in shape)))


def scale_of(name: str) -> str:
    """Return the name of the scales of the tensor ``name``."""
    return f"{name}_scale_inv"


def read_quantization(fields: Fields) -> BlockScales | None:
    """Return how the checkpoint's float8 matrices are scaled; None: it has none.
    Raise ValueError: a quantization (its field is named) that is not implemented."""
    table = fields.table(FIELD)
    if not table:
        return None
    stated = Fields({f"{FIELD}.{name}": value for name, value in table.items()}, fields.place)
    method = f"{FIELD}.quant_method"
    if table.get("quant_method") not in ONLY[method]:
        stated.refuse(method, table.get("quant_method"), ONLY[method])
    field = f"{FIELD}.weight_block_size"
    block = stated.raw(field) if stated.has(field) else list(DEFAULT_BLOCK)
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and bool not in (type(rows), type(columns)):
            scales = BlockScales(rows, columns)
        case _:
            stated.refuse(field, block, ("[rows, columns] of a block",))
    stated.refuse_rest(ONLY, INERT)
    return scales
