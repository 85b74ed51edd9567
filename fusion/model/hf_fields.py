"""Read the fields of a `config.json` by type; whatever is left unread must be off, or the file is refused.

So a field that changes what transformers computes is either implemented or refused by name, also one that this version
of the project has never heard of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INERT = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version _name_or_path use_cache return_dict
    output_attentions output_hidden_states output_router_logits problem_type label2id bos_token_id sep_token_id
    max_window_layers sliding_window
    """.split()
)
"""Fields that change nothing a model computes (a sliding window: as `use_sliding_window` must be false)."""

ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
    "partial_rotary_factor": (1,),
}
"""Fields of which only these values are implemented; the first is what transformers assumes if it is absent."""

OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of an unknown field that switch nothing on"""

FULL = "full_attention"
LARGEST = 1e300
"""Above every number that a config states; no infinity"""


class Fields:
    """The fields of one `config.json`. ``place``: the config key and the file, for messages."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self._values, self._place = values, place
        self._read: set[str] = set()

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; required if there is no default."""
        return self._number(name, int, default)

    def optional_size(self, name: str) -> int | None:
        """Return a positive integer, or None if the field is absent or null."""
        return None if self._get(name, None) is None else self.size(name)

    def positive(self, name: str, default: float) -> float:
        """Return a positive, finite number."""
        return float(self._number(name, (int, float), default))

    def non_negative(self, name: str, default: float) -> float:
        """Return a finite number that is not negative."""
        return float(self._number(name, (int, float), default, zero=True))

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        return self._checked(name, value, "true or false", isinstance(value, bool))

    def token(self, name: str) -> int | None:
        """Return a token id, or None if there is none."""
        value = self._get(name, None)
        return self._checked(name, value, "a token id or null", value is None or is_token(value))

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return token ids that the file states as null, one number or a list."""
        value = self._get(name, None)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(self._checked(name, listed, "token ids", all(map(is_token, listed))))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty if there is none."""
        value = self._get(name, None)
        fits = value is None or isinstance(value, list) and all(isinstance(one, str) for one in value)
        return tuple(self._checked(name, value, "a list of texts", fits) or ())

    def table(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if there is none."""
        value = self._get(name, None)
        return self._checked(name, value, "an object", value is None or isinstance(value, dict)) or {}

    def rope_theta(self, default: float) -> float:
        """Return the base of the rotary embedding; no scaling of it is implemented.

        transformers reads the fields `rope_theta`, `rope_parameters` and, above both, `rope_scaling` (its former name).
        """
        stated = {"rope_theta": self._values["rope_theta"]} if "rope_theta" in self._values else {}
        self._read.add("rope_theta")
        for name in ("rope_parameters", "rope_scaling"):
            for field, value in self.table(name).items():
                if field == "rope_theta":
                    stated[f"{name}.rope_theta"] = value
                elif value not in (("default", None) if field in ("rope_type", "type") else (None,)):
                    self.refuse(f"{name}.{field}", value)
        stated = {name: value for name, value in stated.items() if value is not None}
        checked = {name: Fields(stated, self._place).positive(name, default) for name in stated}
        if len(set(checked.values())) > 1:
            raise ValueError(f"{self._place} contradicts itself: {checked}")
        return next(iter(checked.values()), default)

    def refuse_rest(self) -> None:
        """Check that no field that was not read changes the model.

        Raises:
            ValueError: names the first that does, or may.
        """
        for name, value in self._values.items():
            if name in self._read or name in INERT:
                continue
            if name == "layer_types":
                accepted = isinstance(value, list) and all(one == FULL for one in value)
            else:
                accepted = value in ONLY.get(name, OFF)
            if not accepted:
                self.refuse(name, value)

    def refuse(self, name: str, value: Any) -> None:
        """Raises: ValueError."""
        text = repr(value)
        raise ValueError(
            f"{self._place} sets {name}={text if len(text) < 80 else text[:76] + ' ...'}, which is not supported"
        )

    def _get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def _number(self, name: str, kind: Any, default: float | None, zero: bool = False) -> Any:
        value = self._get(name, default)
        if value is None and name not in self._values:
            raise ValueError(f"{self._place} lacks {name}")
        fits = isinstance(value, kind) and not isinstance(value, bool) and -LARGEST < value < LARGEST
        wanted = "a whole number" if kind is int else "a number"
        return self._checked(name, value, f"{wanted} above 0", fits and (value > 0 or zero and value == 0))

    def _checked(self, name: str, value: Any, wanted: str, fits: bool) -> Any:
        if not fits:
            raise ValueError(f"{self._place}: {name}={value!r}; expected {wanted}")
        return value


def is_token(value: Any) -> bool:
    """Whether ``value`` is a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
