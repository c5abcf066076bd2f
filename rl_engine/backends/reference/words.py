"""The check of options that are one of a few words."""

from __future__ import annotations

from typing import Any, get_args


def require_word(op: str, name: str, word: str, known: Any) -> None:
    """Raise ValueError unless ``word``, argument ``name``, is one of those of the Literal ``known``."""
    if word not in get_args(known):
        raise ValueError(f"{op}: {name} is {word!r}; pass one of {', '.join(get_args(known))}")
