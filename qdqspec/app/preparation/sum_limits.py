"""The limits of int8 weights, given or found, on processors whose sums of two 8-bit products saturate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, cast

import numpy as np

from qdqspec._core.units import count_text
from qdqspec.accuracy.corrections.layers import find_layers
from qdqspec.accuracy.corrections.overflow import PairMaxima, SumLimit, observed_limits
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.quantize.corrections import WeightKey
from qdqspec.qdq.quantize.quantizer import Quantizer
from qdqspec.qdq.quantize.scales import along
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Site

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared


def find_sum_limits(prepared: Prepared, model: Model, samples: int = 16) -> Mapping[str, SumLimit]:
    """The limits of a model's int8 weights on data, or by a proof; none without the correction ``bits``.

    More ``samples`` show rarer sums, and take the time of a run each.
    """
    if not prepared.capabilities.reduce_range or "bits" not in prepared.case.quantize.allowed_corrections:
        return {}
    space, data = prepared.candidates, prepared.calibration
    formats: dict[str, set[str]] = {}
    for unit in space.units:
        own = {name for form in unit.forms if (name := form.choice.activation) in ("int8", "uint8")}
        for tensor, _ in unit.edges:
            formats.setdefault(tensor, set()).update(own)
    step = max(1, (0 if data is None else len(data)) // samples)
    find_limits = partial(
        observed_limits,
        model,
        _int8_weights(space),
        observe=partial(prepared.values_of, model),
        formats=lambda tensor: tuple(sorted(formats.get(tensor, ()))),
    )
    try:
        return find_limits(islice(data or (), 0, step * samples, step))
    except BackendError as error:
        prepared.note_once(f"8-bit weights are used only where they are proved not to overflow: {error.what}")
        return find_limits(())


def note_sum_limits(numbers: Quantizer, space: SchemeSpace, note: Callable[[str], None]) -> None:
    """Note the weights that have more than 7 bits by calibration data, and not by a proof."""
    known = cast("Mapping[str, SumLimit]", numbers.sum_limits)  # those of `find_sum_limits`
    sites = {site.tensor: site for site in _int8_weights(space) if site.tensor in known}
    wide = sum(
        bool(PairMaxima.of_any_input(known[name].layer).overflowing(numbers.integer_weight(site)).any())
        for name, site in sites.items()
    )
    if wide:
        margin = max(limit.margin for limit in known.values())
        note(
            f"{count_text(wide, 'int8 weight')} could overflow on this processor, whose sums of two 8-bit products "
            f"saturate, and {'has' if wide == 1 else 'have'} more than 7 bits: no sum overflows on calibration "
            f"data, with a margin of {margin:.0%}. Inputs that are larger than these may saturate"
        )


def _int8_weights(space: SchemeSpace) -> list[Site]:
    forms = (form for unit in space.units for form in unit.forms)
    return [site for form in forms for site in form.constants if site.format == "int8"]


def without_overflows(
    weights: Mapping[WeightKey, np.ndarray], numbers: Quantizer, note: Callable[[str], None]
) -> dict[WeightKey, np.ndarray]:
    """The scales of int8 weights, with those of ``numbers`` for channels that can overflow, where sums saturate.

    Weights of which no channel keeps its scale are left out. All that change are noted.
    """
    kept, changed = dict[WeightKey, np.ndarray](), 0
    for key, own in weights.items():
        tensor, name, axis = key
        ends = tuple(numbers.model.consumers.get(tensor, ()))
        site = Site(tensor=tensor, consumers=ends, format=name, axis=axis, weight=True)
        wrong = _overflowing(numbers, site, own)
        changed += bool(wrong.any())
        if not wrong.all():
            kept[key] = np.where(wrong, numbers.params(site).scale, own)
    if changed:
        note(
            f"{count_text(changed, 'weight')} would overflow on this processor, whose sums of 8-bit products saturate, "
            "with the scales of the quantized model that the search starts from; channels that would get larger steps"
        )
    return kept


def _overflowing(numbers: Quantizer, site: Site, scale: np.ndarray) -> np.ndarray:
    """The scales of an int8 weight with which it can overflow; all if the layout of the kernel is unknown."""
    if site.format != "int8":
        return np.zeros(scale.shape, bool)
    layer = find_layers(numbers.model, [site], recurrent=True).get(site.tensor)
    if layer is None:
        return np.ones(scale.shape, bool)
    step = along(scale, layer.shape, site.axis or 0, 0)
    integers = np.clip(np.rint(numbers.model.array(site.tensor).astype(np.float32) / step), -128, 127)
    found = (numbers.sum_bound(site) or PairMaxima.of_any_input(layer)).overflowing(integers)
    return found.reshape(scale.shape) if found.size == scale.size else np.full(scale.shape, found.any())
