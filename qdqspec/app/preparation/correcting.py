"""The corrections of a case: products with factors of channels, what helps on calibration data, and limits of weights.

The limits are those of int8 weights, given or found, on processors whose sums of two 8-bit products saturate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np

from qdqspec._core.units import count_text
from qdqspec.accuracy import RehearsalRefusedError
from qdqspec.accuracy.corrections import (
    MIN_SAMPLES,
    NARROW,
    CorrectionTask,
    FoundCorrections,
    PairMaxima,
    Ranges,
    SumLimit,
    find_corrections,
    find_layers,
    observed_limits,
    read_found,
)
from qdqspec.app.preparation.runtimes import reference_runtime
from qdqspec.errors import BackendError
from qdqspec.graph import Model
from qdqspec.qdq import (
    Equalization,
    Quantizer,
    SchemeSpace,
    WeightKey,
    along,
    branched,
    choose_branches,
    equalized,
    scaled_tensors,
)
from qdqspec.types import Placement, Site

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

NEED_RANGES = ("equalization", "ranges")  # corrections that need ranges by calibration
UNTIMED = ("bias", "ranges")  # corrections that `auto` includes only where nothing is timed


def scaled_branches(
    prepared: Prepared, model: Model, samples: int = 16, least_gain: float = 0.5
) -> tuple[Equalization, ...]:
    """The branches whose factors reduce the estimated error of the linear operators behind by ``least_gain``.

    A product takes time, so that less is not worth it. The estimate uses ``samples``: more of them show rarer values,
    and take the time of a run each. If the user or ``start_from`` gives scales, there are no branches: such scales fit
    the unchanged model only.
    """
    case, data = prepared.case, prepared.calibration
    if "equalization" not in case.quantize.allowed_corrections or data is None or len(data) < MIN_SAMPLES:
        return ()
    if case.inputs.scales is not None or prepared.start_scales.tensors or not prepared.capabilities.computes:
        return ()
    possible = branched(model)
    readers = {name for change in possible if change.branch for name in change.branch.readers}
    if not readers:
        return ()
    behind = SchemeSpace(model, prepared.capabilities, allowed=readers, rules=case.quantize)
    if not behind.units:
        return ()
    try:
        return choose_branches(
            model,
            possible,
            lambda extended, sources: prepared.values_of(extended, sources, islice(data, samples)),
            saturates=prepared.capabilities.reduce_range,
            least_gain=least_gain,
        )
    except BackendError:
        return ()  # calibration has the same failure, and reports it


def read_case_corrections(prepared: Prepared, file: Path) -> FoundCorrections | None:
    """The corrections in a file, with the equalized model and its numbers; ``None`` if it has none of this search."""
    known = read_found(file, prepared.journal_header)
    if known is None or not known.equalized:
        return known
    model = equalized(prepared.folded, known.equalized)
    numbers = prepared.recalibrated(model, scaled_tensors(prepared.folded, known.equalized))
    return replace(known, model=model, numbers=numbers)


def find_case_corrections(
    prepared: Prepared,
    *,
    share: float = 0.15,
    seconds: Mapping[str, float] = MappingProxyType({"quick": 5.0, "default": 15.0, "extensive": 60.0}),
    margin_db: float = 3.0,
) -> FoundCorrections:
    """The corrections that help; none without calibration data or if the model cannot be rehearsed.

    They may take ``share`` of the search's time, and at most ``seconds``, by preset: more finds more in slow models.
    None are sought if everything quantized is ``margin_db`` above the SQNR limit: a larger margin seeks them more
    often, and lets selected models be quantized further. Biases and ranges are corrected if nothing is timed, or if the
    case names them: selected models are no faster by them.
    """
    case, tune, rules = prepared.case, prepared.case.tune, prepared.case.quantize
    allowed = rules.allowed_corrections
    if rules.corrections == "auto" and prepared.capabilities.has_clock and tune.objective != "coverage":
        allowed = tuple(name for name in allowed if name not in UNTIMED)
    able = allowed and prepared.capabilities.computes and prepared.space.units
    if not able or prepared.calibration is None:
        return FoundCorrections()
    samples = len(prepared.calibration)
    if samples < MIN_SAMPLES and rules.corrections != "auto":
        prepared.note_once(
            f"corrections need {MIN_SAMPLES} calibration samples, and there are {samples}: none is applied"
        )
    # corrections are sought for any SQNR if accuracy limits the search otherwise, or they are asked for by name
    least_db, enough_db = tune.limits.min_sqnr_db, math.inf
    if tune.accuracy is None and tune.objective != "pareto" and rules.corrections == "auto":
        enough_db = -math.inf if least_db is None else least_db + margin_db
    if samples < MIN_SAMPLES or enough_db == -math.inf:
        return FoundCorrections()
    given = () if case.inputs.scales is None else NEED_RANGES
    numbers = prepared.calibrated[1]
    weights = numbers.corrections.weights  # those of a quantized model that the search starts from
    most = seconds[tune.preset]
    with ExitStack() as opened:
        task = CorrectionTask(
            model=prepared.folded,
            numbers=numbers,
            placements=judged_placements(prepared.space),
            feeds=prepared.feeds,
            runtime=reference_runtime(opened, prepared.options, prepared.backend),
            rounds_biases=prepared.capabilities.rounds_biases,
            ranges=partial(_ranges, prepared),
            method=rules.calibration,
            observe=prepared.values_of,
            allowed=tuple(name for name in allowed if name not in given),
            saturates=prepared.capabilities.reduce_range,
            fixed=frozenset((*prepared.start_scales.ranges, *(tensor for tensor, _, _ in weights))),
            recalibrated=prepared.recalibrated,
            enough_db=enough_db,
            seconds=most if tune.minutes is None else min(most, share * 60 * tune.minutes),
        )
        try:
            found = find_corrections(task)
        except (BackendError, RehearsalRefusedError) as error:
            prepared.note_once(f"no corrections are applied: {error.what}")
            return FoundCorrections()
    for name, reason in found.failures.items():
        prepared.note_once(f"the correction '{name}' could not be tried: {reason}")
    return found


def _ranges(prepared: Prepared, model: Model, even: bool) -> Mapping[str, Ranges]:
    """Ranges of all activations by the case's method and `NARROW`, of all samples or of the ``even`` ones."""
    found = prepared.tensor_ranges(model, prepared.space.tensors, NARROW, every=2 if even else 1)
    return {str(method): ranges for method, ranges in found.items()}


def judged_placements(space: SchemeSpace) -> tuple[Placement, ...]:
    """The placements that corrections are judged on: everything, and only linear operators with float outputs."""
    linear = {
        unit.id: "in-only"
        for unit in space.units
        if unit.op_type in ("Gemm", "MatMul") and "in-only" in unit.labels
    }
    found = (space.resolve(space.everything()), space.resolve(linear))
    return tuple({placement.digest: placement for placement in found if placement.sites}.values())


# ---- limits of int8 weights --------------------------------------------------------------------


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
        layer = find_layers(numbers.model, [site]).get(tensor) if name == "int8" else None
        if layer is None:  # all can overflow if the layout of the kernel is unknown
            wrong = np.full(own.shape, name == "int8")
        else:
            step = along(own, layer.shape, axis or 0, 0)
            integers = np.clip(np.rint(numbers.model.array(tensor).astype(np.float32) / step), -128, 127)
            wrong = (numbers.sum_bound(site) or PairMaxima.of_any_input(layer)).overflowing(integers)
            wrong = wrong.reshape(own.shape) if wrong.size == own.size else np.full(own.shape, wrong.any())
        changed += bool(wrong.any())
        if not wrong.all():
            kept[key] = np.where(wrong, numbers.params(site).scale, own)
    if changed:
        note(
            f"{count_text(changed, 'weight')} would overflow on this processor, whose sums of 8-bit products saturate, "
            "with the scales of the quantized model that the search starts from; channels that would get larger steps"
        )
    return kept
