"""The decorator of the rules for ONNX Runtime, ids ``ORT001`` and so on."""

from __future__ import annotations

from functools import partial

from qdqspec.lint import rules

TARGETS = ("onnxruntime-cpu",)

rule = partial(rules.rule, targets=TARGETS)
