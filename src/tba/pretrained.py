"""Pretrained models of others: how they are loaded without running code of theirs, and what they can hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from tba.errors import UserError
from tba.json_input import parse_json
from tba.types import Json

MOST_COUNTED = 10_000  # layers, heads or experts of a model
_COUNT_NAME = re.compile(r"(?:layer|block|head|expert)s?$")  # names in a config.json
SAFE: dict[str, Any] = {"trust_remote_code": False}  # for `from_pretrained` of configurations and tokenizers
SAFE_MODEL: dict[str, Any] = {**SAFE, "use_safetensors": True}  # for models: no pickle, whatever files there are
UNREADABLE = (  # what transformers raises for a folder whose files are not what they should be
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError),
    *(ArithmeticError, ImportError, AssertionError, SafetensorError, StrictDataclassError),
)


def most_positions(config: Any) -> int | None:
    """Returns how many positions of a causal model can be used; None: it has no limit.

    With `longrope` (Phi-3 of 128k) only the positions that the model was first trained for: one longer sequence in a
    pass changes the rotation of all others.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return limit
    name = "original_max_position_embeddings"
    return min((n for n in (limit, rope.get(name) or getattr(text, name, None)) if n), default=None)


def refuse_impossible_counts(folder: Path) -> None:
    """Raises `UserError` for a model's folder whose config.json has more layers, heads or experts than any model, so
    that building them would not end. A file that is no JSON passes: whoever loads it says what is wrong.
    """
    file = folder / "config.json"
    try:
        sections: list[Json] = [parse_json(file.read_bytes())]
    except (OSError, ValueError):
        return
    while sections:
        section = sections.pop()
        for name, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict):
                sections.append(value)
            elif _COUNT_NAME.search(name) and isinstance(value, int | float) and not value <= MOST_COUNTED:
                raise UserError(f"{file} has {name} {value!s:.20}, more than {MOST_COUNTED:,}: give another model")


def require_embedded(token: int, embeddings: int) -> None:
    """Raises `UserError` for a token that a model has no embedding for."""
    if token >= embeddings:
        raise UserError(
            f"the tokenizer writes the token {token}, and the model has embeddings of {embeddings}: resize the model's "
            "(resize_token_embeddings) and save it, or give its own tokenizer"
        )
