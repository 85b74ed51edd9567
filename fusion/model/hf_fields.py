"""Read the fields of a `config.json` by type; whatever is left unread must be off, or the file is refused.

So a field that changes what transformers computes is either implemented or refused by name, also one that this version
of the project has never heard of."""

from collections.abc import Mapping
from typing import Any, NoReturn

INERT = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version _name_or_path use_cache return_dict
    output_attentions output_hidden_states output_router_logits problem_type label2id bos_token_id sep_token_id
    """.split()
)
"""Fields that change nothing a model computes. A family may have others."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
}
"""Fields of which only these values are implemented; the first is what transformers assumes if it is absent. A family
may have others."""

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of an unknown field that switch nothing on"""

FULL = "full_attention"
LARGEST = 1e300
"""Bound above every number that a config states; no infinity"""
MOST = dict.fromkeys("num_experts num_local_experts n_routed_experts num_experts_per_tok".split(), 1 << 14) | {
    "num_hidden_layers": 1 << 12,
    "num_nextn_predict_layers": 1 << 8,
}
MOST_SIZE = (1 << 31) - 1
"""The largest whole number of the fields of MOST, and of all others: above those of every published model, and of an
order that the tables of a folder can be built for"""


class Fields:
    """The fields of one `config.json`. ``place``: the config key and the file, for messages. ``renamed``: other name of
    a field → the name that it is read by.
    Raise ValueError: a field has two values under two names."""

    def __init__(self, values: Mapping[str, Any], place: str, renamed: Mapping[str, str] | None = None) -> None:
        self._values, self.place = dict(values), place
        self._read: set[str] = set()
        self._stated_as: dict[str, str] = {}
        for other, name in (renamed or {}).items():
            if other not in values:
                continue
            value = self._values.pop(other)
            if self._values.setdefault(name, value) != value:
                raise ValueError(f"{place} contradicts itself: { {other: value, name: values[name]} }")
            if name not in values:
                self._stated_as[name] = other

    def stated_as(self, name: str) -> str:
        """Return the name under which the file states the field."""
        return self._stated_as.get(name, name)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; required if there is no default."""
        return self._number(name, int, default)

    def optional_size(self, name: str) -> int | None:
        """Return a positive integer, or None if the field is absent or null."""
        return None if self._get(name, None) is None else self.size(name)

    def count(self, name: str, default: int) -> int:
        """Return a whole number that is not negative."""
        return self._number(name, int, default, zero=True)

    def has(self, name: str) -> bool:
        """Return whether the file states the field, be it as null."""
        return name in self._values

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        return float(self._number(name, (int, float), default))

    def non_negative(self, name: str, default: float) -> float:
        """Return a finite number that is not negative."""
        return float(self._number(name, (int, float), default, zero=True))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        return self._checked(name, value, "true or false", isinstance(value, bool))

    def token(self, name: str, default: int | None = None) -> int | None:
        """Return a token id, or None if there is none."""
        value = self._get(name, default)
        return self._checked(name, value, "a token id or null", value is None or is_token(value))

    def tokens(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """Return token ids that the file states as null, one number or a list."""
        value = self._get(name, default)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(self._checked(name, listed, "token ids", all(map(is_token, listed))))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty if there is none."""
        value = self._get(name, None)
        fits = value is None or isinstance(value, list) and all(isinstance(text, str) for text in value)
        return tuple(self._checked(name, value, "a list of texts", fits) or ())

    def table(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if there is none."""
        value = self._get(name, None)
        return self._checked(name, value, "an object", value is None or isinstance(value, dict)) or {}

    def indices(self, name: str) -> tuple[int, ...]:
        """Return a list of numbers from 0 on; empty if there is none."""
        value = self._get(name, None)
        fits = value is None or isinstance(value, list) and all(map(is_token, value))
        return tuple(self._checked(name, value, "a list of whole numbers", fits) or ())

    def raw(self, name: str) -> Any:
        """Return a value of any type; None if there is none. The caller checks it."""
        return self._get(name, None)

    def refuse_rest(self, only: Mapping[str, tuple[Any, ...]], inert: frozenset[str]) -> None:
        """Check that no field that was not read changes the model. ``only``: the family's fields of which only these
        values are implemented, besides `ONLY`. ``inert``: the family's fields that change nothing, besides `INERT`.
        Raise ValueError: names the first that does, or may."""
        only = {**ONLY, **only}
        for name, value in self._values.items():
            if name in self._read or name in INERT or name in inert:
                continue
            if name == "layer_types":
                if not isinstance(value, list) or any(kind != FULL for kind in value):
                    self.refuse(name, value, ([FULL],))
            elif value not in only.get(name, OFF):
                self.refuse(name, value, only.get(name, ()))

    def refuse(self, name: str, value: Any, supported: tuple[Any, ...] = ()) -> NoReturn:
        """Raise a ValueError that names the field, its value and the values that are supported."""
        text = repr(value)
        text = text if len(text) < 80 else text[:76] + " ..."
        among = f"; supported: {', '.join(map(repr, supported))}" if supported else ""
        raise ValueError(
            f"{self.place} sets {self.stated_as(name)}={text}, which is not supported{among} (docs/model_family.md)"
        )

    def _get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def _number(self, name: str, kind: Any, default: float | None, zero: bool = False) -> Any:
        value = self._get(name, default)
        if value is None and name not in self._values:
            raise ValueError(f"{self.place} lacks {name}")
        fits = isinstance(value, kind) and not isinstance(value, bool) and -LARGEST < value < LARGEST
        wanted = f"a {'whole ' if kind is int else ''}number {'from 0 on' if zero else 'above 0'}"
        largest = MOST.get(name, MOST_SIZE)
        if kind is int and fits and value > largest:
            fits, wanted = False, f"{wanted}, at most {largest}"
        return self._checked(name, value, wanted, fits and (value > 0 or zero and value == 0))

    def _checked(self, name: str, value: Any, wanted: str, fits: bool) -> Any:
        if not fits:
            raise ValueError(f"{self.place}: {self.stated_as(name)}={value!r}; expected {wanted}")
        return value


def is_token(value: Any) -> bool:
    """Return whether ``value`` is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
