"""Models that are given quantized: the float form, which is the reference, and the model as given, a candidate."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qdqspec._core.units import count_text
from qdqspec.graph.definition import is_quantized
from qdqspec.graph.given import OwnCopy, fixed_in
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.trt import is_pair_op
from qdqspec.qdq.read.import_qdq import Imported, import_placement
from qdqspec.qdq.read.strip import strip_qdq
from qdqspec.types import Placement


class FloatForm(OwnCopy):
    """A copy of a ``quantized`` model without its pairs, which are ``imported`` with their numbers."""

    def __init__(self, quantized: Model, imported: Imported) -> None:
        self.quantized = quantized
        self.imported = imported
        count = count_text(len(imported.placement.sites), "tensor")
        note = (
            f"the model is given quantized ({count}): the reference is its float form, a copy without Q/DQ, and the "
            "model as given is a candidate; if you have the original float model, tune that with --start-from this one"
        )
        super().__init__(
            quantized,
            strip_qdq(quantized).proto,
            sha256=hashlib.sha256(f"{quantized.sha256} float form".encode()).hexdigest(),
            fixed=fixed_in(quantized),
            notes=[note, *imported.notes],
        )

    @property
    def file(self) -> Path:
        """The file of the model as given."""
        return require_path(self.quantized)

    @property
    def placement(self) -> Placement:
        """The pairs of the model as given, which has its own numbers."""
        return Placement(sites=self.imported.placement.sites, given=True)


def with_float_form(model: Model) -> Model:
    """The model, or its float form if it has pairs that a placement expresses."""
    if not (is_quantized(model) or any(is_pair_op(node.proto) for node in model.nodes)):
        return model
    imported = import_placement(model)
    return FloatForm(model, imported) if imported.placement.sites else model


def float_form_of(model: Model) -> FloatForm | None:
    """The float form that a model is, or a copy of; ``None`` for a model that was given in float."""
    while not isinstance(model, FloatForm):
        if not isinstance(model, OwnCopy):
            return None
        model = model.origin
    return model
