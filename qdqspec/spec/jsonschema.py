"""The JSON Schema of spec files, for editors."""

from __future__ import annotations

from typing import Any

from qdqspec.spec.models import Spec


def spec_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a spec file, with the parameters of every registered check."""
    schema = _tidy(Spec.model_json_schema(mode="validation"))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "qdqspec spec file (*.qdq.yaml)",
        **schema,
        "description": "What must hold of one quantized ONNX model.",
        "required": ["qdqspec", *schema["required"]],
    }


def _tidy(node: Any) -> Any:
    """The schema without generated titles and empty defaults.

    No alternative is ``null``: a key of a file either has a value or is omitted.
    """
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: {name: _tidy(part) for name, part in value.items()}  # names here are user-defined keys
        if key in ("properties", "$defs")
        else _tidy(value)
        for key, value in node.items()
        if not (
            (key == "title" and isinstance(value, str))
            or (key == "default" and (value is None or isinstance(value, dict | list)))
        )
    }
    choices = [choice for choice in kept.pop("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        return {**choices[0], **kept}
    return {**kept, "anyOf": choices} if choices else kept
