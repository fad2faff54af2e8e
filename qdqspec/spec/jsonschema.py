"""The JSON Schema of spec files, for editors. May import floor 0 and pydantic."""

from __future__ import annotations

from typing import Any

from qdqspec.spec.models import Spec


def spec_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a spec file, with the parameters of every registered check."""
    schema = _without_null(Spec.model_json_schema(mode="validation"))
    assert isinstance(schema, dict)
    schema["required"] = sorted({"qdqspec", *schema["required"]})
    schema["properties"]["checks"]["minItems"] = 1
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "qdqspec spec file (*.qdq.yaml)",
        "description": "What must hold of one quantized ONNX model.",
    }


def _without_null(node: Any) -> Any:
    """A key of a file either has a value or is left out, so no alternative is ``null``."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {k: _without_null(v) for k, v in node.items() if not (k == "default" and v is None)}
    choices = [c for c in kept.get("anyOf", ()) if c != {"type": "null"}]
    if len(choices) == 1:
        del kept["anyOf"]
        return {**choices[0], **kept}
    return {**kept, "anyOf": choices} if choices else kept
