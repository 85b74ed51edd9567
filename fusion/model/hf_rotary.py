"""Read the rotary embedding from the fields of a `config.json`, and write it.

transformers reads `rope_theta`, `partial_rotary_factor`, `rope_parameters` and, above these, `rope_scaling` (its former
name). A file may state a value in several places if they agree."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fusion.model.hf_fields import Fields
from fusion.model.spec import Rotary

TABLES = ("rope_parameters", "rope_scaling")
SHARED = {"rope_theta", "partial_rotary_factor"}
"""Fields that may be stated outside of the tables, too"""
POSITIONS = {"original_max_position_embeddings": "original_max_positions"}
KINDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "yarn": {"factor": "factor"}
    | POSITIONS
    | {name: name for name in "attention_factor beta_fast beta_slow truncate mscale mscale_all_dim".split()},
    "llama3": {"factor": "factor"} | POSITIONS | {name: name for name in ("low_freq_factor", "high_freq_factor")},
}
"""rope_type → the fields that it has besides `rope_theta` and `partial_rotary_factor` → their names in `Rotary`."""
OPTIONAL = ("mscale", "mscale_all_dim")
"""Fields that are not stated where they are 0"""


def read_rotary(
    fields: Fields, head_dim: int, *, max_positions: int, theta: float = 10000.0, partial: float | None = None
) -> Rotary:
    """Read the rotary embedding of heads of ``head_dim`` channels. ``theta``: what transformers assumes where no base
    is stated. ``partial``: the share of the channels that is rotated where none is stated; None: the family rotates
    all.
    Raise ValueError: a kind or a field (named) that is not implemented, or two statements that differ."""
    stated = _Statements(fields)
    kind = stated.agreed("rope_type", Fields.raw, "default")
    if not isinstance(kind, str) or kind not in KINDS:
        stated.refuse("rope_type", tuple(KINDS))
    share = stated.number("partial_rotary_factor", 1.0 if partial is None else partial)
    if share > 1 or partial is None and share != 1:
        stated.refuse("partial_rotary_factor", (1.0,) if partial is None else ("a number up to 1",))
    rotary = Rotary(width=int(head_dim * share), theta=stated.number("rope_theta", theta))
    if rotary.width < 2 or rotary.width % 2:
        raise ValueError(
            f"{fields.place}: head_dim={head_dim} and partial_rotary_factor={share} rotate {rotary.width} channels; "
            "expected an even number"
        )
    if kind == "yarn":
        rotary = _yarn(stated, rotary, max_positions)
    elif kind == "linear":
        rotary = Rotary(rotary.width, rotary.theta, "linear", stated.number("factor"))
    elif kind == "llama3":
        rotary = _llama3(stated, rotary, max_positions)
    stated.refuse_rest()
    return rotary


def _yarn(stated: "_Statements", rotary: Rotary, max_positions: int) -> Rotary:
    factor, scale, scale_all = stated.number("factor"), stated.maybe("mscale"), stated.maybe("mscale_all_dim")
    if scale and scale_all:
        derived = _attention_scale(factor, scale) / _attention_scale(factor, scale_all)
    else:
        derived = _attention_scale(factor, 1.0)
    return Rotary(
        rotary.width,
        rotary.theta,
        "yarn",
        factor,
        attention_factor=stated.number("attention_factor", derived),
        original_max_positions=stated.agreed("original_max_position_embeddings", Fields.size, max_positions),
        beta_fast=stated.maybe("beta_fast") or 32.0,
        beta_slow=stated.maybe("beta_slow") or 1.0,
        truncate=stated.agreed("truncate", lambda fields, place: fields.flag(place, True), True),
        mscale=scale or 0.0,
        mscale_all_dim=scale_all or 0.0,
    )


def _llama3(stated: "_Statements", rotary: Rotary, max_positions: int) -> Rotary:
    low, high = stated.number("low_freq_factor"), stated.number("high_freq_factor")
    if low >= high:
        stated.refuse("high_freq_factor", (f"a number above low_freq_factor={low}",))
    return Rotary(
        rotary.width,
        rotary.theta,
        "llama3",
        stated.number("factor"),
        original_max_positions=stated.agreed("original_max_position_embeddings", Fields.size, max_positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def softmax_scale(rotary: Rotary, head_dim: int) -> float:
    """Return the factor of the scores of latent attention: 1 / sqrt(head_dim), times the square of the scale that
    `mscale_all_dim` states (as in DeepSeek's modelling code)."""
    if not rotary.mscale_all_dim:
        return head_dim**-0.5
    scale = _attention_scale(rotary.factor, rotary.mscale_all_dim)
    return head_dim**-0.5 * scale * scale


def _attention_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def write_rotary(rotary: Rotary, head_dim: int, states_share: bool = False) -> dict[str, Any]:
    """Return the fields that `read_rotary` reads, under their present and their former names. ``states_share``: state
    the share of rotated channels though all are: it is not the family's default."""
    values = {field: getattr(rotary, name) for field, name in KINDS[rotary.kind].items()}
    stated = {field: value for field, value in values.items() if value or field not in OPTIONAL}
    table: dict[str, Any] = {"rope_type": rotary.kind, **stated}
    former = {"rope_scaling": dict(table)} if rotary.kind != "default" else {}
    share = rotary.width / head_dim
    if int(head_dim * share) < rotary.width:
        share = math.nextafter(share, 1.0)
    partial = {"partial_rotary_factor": share} if states_share or rotary.width < head_dim else {}
    parameters = table | {"rope_theta": rotary.theta} | partial
    return {"rope_theta": rotary.theta, "rope_parameters": parameters} | partial | former


def _named(table: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_type" if field == "type" else field: value for field, value in table.items() if value is not None}


class _Statements:
    """What the tables and the two fields beside them state, by field, without nulls."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._stated: dict[str, dict[str, Any]] = {}
        self._read: set[str] = set()
        for name in ("rope_theta", "partial_rotary_factor"):
            value = fields.raw(name)
            if value is not None:
                self._stated[name] = {name: value}
        tables = {table: fields.table(table) for table in TABLES}
        for table, values in tables.items():
            for field, value in values.items():
                if value is not None:
                    self._stated.setdefault("rope_type" if field == "type" else field, {})[f"{table}.{field}"] = value
        if all(tables.values()):  # of two tables transformers reads one
            new, former = ({field: tables[table][field] for field in tables[table].keys() - SHARED} for table in TABLES)
            if _named(new) != _named(former):
                raise ValueError(f"{fields.place} contradicts itself: rope_parameters={new}, rope_scaling={former}")

    def refuse(self, field: str, supported: tuple[Any, ...]) -> NoReturn:
        place, value = next(iter(self._stated[field].items()))
        self._fields.refuse(place, value, supported)

    def refuse_rest(self) -> None:
        for field in self._stated.keys() - self._read:
            self.refuse(field, ())

    def number(self, field: str, default: float | None = None) -> float:
        return self.agreed(field, Fields.positive, default)

    def maybe(self, field: str) -> float | None:
        """Return a number that may be 0; None where there is none."""
        return self.agreed(field, lambda fields, place: fields.non_negative(place, 0.0), None, optional=True)

    def agreed(self, field: str, read: Callable[[Fields, str], Any], default: Any, optional: bool = False) -> Any:
        """Return the value of a field, which ``read`` takes from each place that states it.
        Raise ValueError: two places state different values, or none does and there is no default."""
        self._read.add(field)
        places = self._stated.get(field, {})
        fields = Fields(places, self._fields.place)
        values = {place: read(fields, place) for place in places}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise ValueError(f"{self._fields.place} contradicts itself: {values}")
        if not values and default is None and not optional:
            raise ValueError(f"{self._fields.place} lacks rope_parameters.{field}")
        return next(iter(values.values()), default)
