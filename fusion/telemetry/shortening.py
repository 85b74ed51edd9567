"""Shorten texts to their start and their end. Pure."""

from collections.abc import Mapping
from typing import Any


def shortened(text: Any, limit: int) -> str:
    """Return a text of at most about ``limit`` characters; anything else by its own text."""
    text = text if isinstance(text, str) else str(text)
    if len(text) <= limit:
        return text
    start, end = limit // 3, limit - limit // 3
    return f"{text[:start]}\n… {len(text) - start - end:,} characters left out …\n{text[-end:]}"


def abridged(value: Any, limit: int) -> Any:
    """Return plain JSON whose texts have at most about ``limit`` characters."""
    if isinstance(value, Mapping):
        return {name: abridged(item, limit) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [abridged(item, limit) for item in value]
    return shortened(value, limit) if isinstance(value, str) else value
