"""A report as JSON, schema 1: the records of `harness.result`, their fields in their order.

Floats are written so that they read back as the same float64; NaN and the infinities, which JSON
lacks, are the strings "nan", "inf" and "-inf". Each result stands on a line of its own, so that
two reports can be compared by `diff`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from harness.result import Model, Report


def as_json(report: Report) -> str:
    """The report as a JSON object, with a newline at its end."""
    lines = []
    for field in fields(report):
        value = getattr(report, field.name)
        lines.append(f"{json.dumps(field.name)}: {_block(value)}")
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _block(value: object) -> str:
    """JSON of a top-level value: a list of records has one record a line."""
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return "[\n    " + ",\n    ".join(_dumps(record) for record in value) + "\n  ]"
    return _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(plain(value), allow_nan=False)


def plain(value: object) -> object:
    """The value in JSON's own types. TypeError for a type that has no place in a report."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Model):
        # A model has a seed or a path: the other one is no field of it.
        record = {f.name: getattr(value, f.name) for f in fields(value)}
        del record["path" if value.path is None else "seed"]
        return record
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    raise TypeError(f"a report must hold plain values (got {type(value).__name__}: {value!r})")
