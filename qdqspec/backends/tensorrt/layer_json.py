"""Reads the JSON that TensorRT's inspector and trtexec write, including its known defects.

trtexec does not escape profile names, and the inspector's text contains unescaped control characters
(both seen in recorded files), so that strict JSON parsers reject valid content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from qdqspec.errors import BackendError

Json: TypeAlias = Mapping[str, Any]

_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_PROFILE_LINE = re.compile(
    rf'[\[,\s]*\{{\s*"name"\s*:\s*"(?P<name>.*)"\s*,\s*"timeMs"\s*:\s*(?P<timeMs>{_NUMBER})'
    rf'(?:\s*,\s*"averageMs"\s*:\s*(?P<averageMs>{_NUMBER}))?'
    rf'(?:\s*,\s*"medianMs"\s*:\s*(?P<medianMs>{_NUMBER}))?[^}}]*\}}[\]\s]*'
)
_LAYER_INFORMATION, _PROFILE = "layer information", "layer profile"


def read_graph(text: str | Json) -> Json:
    """The top object of the layer information; raises `BackendError` if there is none."""
    found = text if isinstance(text, Mapping) else _loaded(text, _LAYER_INFORMATION)
    if not isinstance(found, Mapping) or not isinstance(found.get("Layers", []), list):
        raise _unusable(_LAYER_INFORMATION, "it holds no list of layers")
    return found


def read_profile(profile: str | Sequence[Json] | None) -> tuple[tuple[str, float], ...]:
    """Name and mean milliseconds of every layer execution, in order; names may repeat.

    The first entry that trtexec writes counts runs and has no name. Old versions write no median.
    """
    if profile is None:
        return ()
    entries = _profile_entries(profile) if isinstance(profile, str) else profile
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise _unusable(_PROFILE, "it is not a list of layers")
    runs = next((entry["count"] for entry in entries if "count" in entry and "name" not in entry), 1)
    return tuple((_text(entry["name"]), _mean_ms(entry, runs)) for entry in entries if "name" in entry)


def read_times(text: str) -> tuple[float, ...]:
    """GPU compute milliseconds of every query that ``--exportTimes`` wrote."""
    found = _loaded(text, "list of times")
    if not isinstance(found, list) or not all(isinstance(query, Mapping) for query in found):
        raise _unusable("list of times", "it is not a list of queries")
    return tuple(_milliseconds(query.get("computeMs"), "computeMs") for query in found)


def _profile_entries(text: str) -> Any:
    try:
        return _loaded(text, _PROFILE)
    except BackendError:
        # One entry per line; an unescaped quote in a name ends the string for a JSON parser, but not here.
        rows = [found.groupdict() for line in text.split("\n") if (found := _PROFILE_LINE.fullmatch(line))]
        if not rows:
            raise
    return [
        {key: value if key == "name" else float(value) for key, value in row.items() if value is not None}
        for row in rows
    ]


def _loaded(text: str, what: str) -> Any:
    """Parse JSON; on failure again with stray backslashes as literal characters."""
    try:
        try:
            return json.loads(text, strict=False)
        except ValueError:
            repaired = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", text)
            return json.loads(repaired, strict=False)
    except (ValueError, RecursionError) as error:
        raise _unusable(what, f"it is not JSON: {error}") from None


def _mean_ms(entry: Json, runs: object) -> float:
    for key in ("averageMs", "medianMs"):
        if key in entry:
            return _milliseconds(entry[key], key)
    count = runs if isinstance(runs, int) and runs > 0 else 1
    return _milliseconds(entry.get("timeMs"), "timeMs") / count


def _milliseconds(value: object, key: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]  # a number by now
        raise _unusable("timing", f"{key} is {value!r:.40}, which is no time")
    return float(value)  # type: ignore[arg-type]  # a number by now


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _unusable(what: str, why: str) -> BackendError:
    return BackendError(
        f"TensorRT's {what} cannot be used: {why}",
        cure="write it anew with --exportLayerInfo, --exportProfile and --exportTimes",
    )
