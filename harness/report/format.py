"""How the text report writes a figure. Plain ASCII throughout."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float) -> str:
    """Four significant digits: bf16 has fewer than three."""
    return f"{value:.4g}" if isinstance(value, float) else counted(value)


def counted(value: int) -> str:
    """A count, with its thousands apart."""
    return f"{value:,}"


def place(index: Sequence[int]) -> str:
    """A coordinate: [0,12,3]."""
    return f"[{','.join(str(i) for i in index)}]"


def seconds(value: float) -> str:
    """A duration as a reader says it."""
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{value:.1f} s"


_ASCII = str.maketrans(
    {"×": "x", "·": "*", "−": "-", "–": "-", "—": "-", "…": "...", "π": "pi", "θ": "theta"}
    | {"≤": "<=", "≥": ">=", "±": "+-", "→": "->", "’": "'", "‘": "'", "“": '"', "”": '"', "─": "-"}
)


def in_encoding(text: str, encoding: str) -> str:
    """`text` in characters that `encoding` has; others become their ASCII likeness, or `?`."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    return text
