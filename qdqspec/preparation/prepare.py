"""Prepares a case for tuning: load the model, fold it, calibrate it, and derive the space of placements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from qdqspec.arrays import Array, Feed
from qdqspec.backends.base import Backend, BuildOptions, Capabilities, Engine
from qdqspec.config import hooks
from qdqspec.corrections.find import FoundCorrections
from qdqspec.corrections.judge import MIN_SAMPLES
from qdqspec.corrections.overflow import SumLimit, observed_limits, overflows
from qdqspec.errors import BackendError, PatternError
from qdqspec.graph.cautions import cautions
from qdqspec.graph.declared import with_types
from qdqspec.graph.definition import is_quantized
from qdqspec.graph.float32 import computes_in_float16, with_integer_kernels
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.observe import observe
from qdqspec.graph.wire import Parts
from qdqspec.measurement.profiles import Load
from qdqspec.parity.data import Dataset, data_warnings, feed_of_shapes, open_data, random_feeds
from qdqspec.parity.metrics import Scores
from qdqspec.parity.shapes import InputSpec, input_specs, resized, resolve_shapes, shape_profiles, shapes_text
from qdqspec.placement.edit.equalize import Equalization, equalized, products_of, touched
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.placement.space.units import format_choices
from qdqspec.preparation.auxiliary_runs import FusionBuild, Groups, Observing, groups_of_file, runner
from qdqspec.preparation.branching import scaled_branches
from qdqspec.preparation.correcting import Correcting, CorrectionSource
from qdqspec.preparation.definition import (
    Definition,
    compared_with_definition,
    definition_warning,
    difference_text,
)
from qdqspec.preparation.float_form import float_form_of
from qdqspec.preparation.start import KeptScales, kept_scales, without_overflows
from qdqspec.quantize.calibrate import calibrate, given_ranges
from qdqspec.quantize.corrections import Corrections
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange, tie_ranges
from qdqspec.quantize.saturation import saturations
from qdqspec.regions.expressions import allowed_nodes, denied_nodes, parse, require_matches, unmatched
from qdqspec.regions.search import find_regions
from qdqspec.spec.problems import Problem, source_lines, spec_error
from qdqspec.types import (
    Case,
    DataSource,
    DefinitionEvidence,
    InputShape,
    PatternRules,
    Placement,
    Region,
    Site,
)
from qdqspec.units import count_text

RANDOM_SAMPLES = 8
_GIVE_DATA = "random inputs may not suit this model: give it real ones (inputs.calibration, or --calibration)"


class Prepared:
    """A case with its model, and everything derived from both; each attribute is computed on first access.

    ``given`` is the user's model, ``base`` the same in float32 if it computes in float16 and the backend has no integer
    kernels for pairs of float16 tensors, ``folded`` that with BatchNormalization folded, and with branches that have
    factors; ``model`` is the one that pairs are inserted into, with scaled constants if equalization helps.
    ``quantized`` is the form of ``given`` whose model as given is a candidate, if the user's model has pairs.
    ``warnings`` collects notes for the user.
    """

    def __init__(self, case: Case, given: Model, backend: Backend, options: BuildOptions, seed: int) -> None:
        self.case = case
        self.given = given
        self.backend = backend
        self.options = options
        self.quantized = float_form_of(given)
        self.base, self.warnings = given, [*cautions(given), *given.notes]
        if computes_in_float16(given):  # else the backend is not asked before its capabilities are needed
            self.base, note = with_integer_kernels(given, quantizes_half=self.capabilities.quantizes_half)
            self.warnings += [note] if note else []
        self._seed = seed
        self._source = CorrectionSource()
        self._limits: tuple[Model, Mapping[str, SumLimit]] | None = None
        self.calibration_seconds = 0.0  # of the calibration of the space, if it was made here
        for name, value in case.inputs.values.items():
            self.note_once(
                f"input '{name}' is fixed to {value}: the tuned model has no such input; it is timed against the model "
                "specialized to that value, and its outputs are compared with those of the file given"
            )
        self._plain = fold_weights(self.base).model
        if case.quantize.dq_dtype is not None:
            self._plain = with_types(self._plain, case.quantize.dq_dtype)

    @cached_property
    def folded(self) -> Model:
        """The model without BatchNormalization, with products where factors of channels reduce the error."""
        found = scaled_branches(self, self._plain)
        if found.changes:
            products = count_text(len(found.changes), "product")
            self.note_once(
                f"equalization inserts {products} with factors of channels between a normalization and the linear "
                f"operators that read it: {found.after_db:.1f} dB in place of {found.before_db:.1f} with these "
                "operators alone quantized, on held-out calibration samples"
            )
        return equalized(self._plain, found.changes)

    @property
    def is_converted(self) -> bool:
        """Whether candidates are in float32, and the user's model in float16."""
        return self.base is not self.given

    @cached_property
    def capabilities(self) -> Capabilities:
        """The integer capabilities of the backend on this device."""
        return self.backend.capabilities(self.options)

    @cached_property
    def inputs(self) -> dict[str, InputSpec]:
        """Type and shape of every input in this case."""
        inputs = self.case.inputs
        return input_specs(self.given, resolve_shapes(self.given, inputs), inputs.profiles)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the model, by the rules of the case."""
        return find_regions(self.folded, self.case.regions, groups=self.fused)

    def replay_command(self, file: str) -> str:
        """The shell command that builds and times a candidate with a tool of the runtime; empty if it has none."""
        hook = hooks.declaration_of(self.backend.name).replay
        return hooks.load(hook)(self.given, file, self.options) if hook else ""

    @cached_property
    def fused(self) -> Groups:
        """Nodes of each kernel of the float model, if regions follow fusions: from a file or the backend."""
        rules = self.case.regions
        if rules.by != "fusion":
            return ()
        if rules.graph is not None:
            return groups_of_file(rules.graph, self.given)
        half, note = self.capabilities.fuses_in_half, self.warnings.append
        build = FusionBuild(self.given, require_path(self.given), self.backend, self.options, half, note)
        groups = build.groups(self.sample)
        if not groups:
            self.warnings.append(f"{self.backend.name} reports no kernels: regions follow structure instead")
        return groups

    @cached_property
    def candidates(self) -> SchemeSpace:
        """All placements that the backend supports and the spec allows, before calibration."""
        require_patterns(self.case)
        require_matches(self.folded, self.case.patterns)
        for pattern in unmatched(self.folded, self.case.patterns):
            self.warnings.append(f"pattern '{pattern}' matches nothing in {self.given.where}")
        self._warn_formats()
        products = products_of(self.folded)
        return SchemeSpace(
            self.folded,
            self.capabilities,
            allowed=allowed_nodes(self.folded, self.case.patterns) - products,
            denied=denied_nodes(self.folded, self.case.patterns) | products,
            rules=self.case.quantize,
            regions=self.regions,
        )

    @cached_property
    def calibration(self) -> Dataset | None:
        """The calibration data; ``None`` if the case has none."""
        source = self.case.inputs.calibration
        if source is None:
            return None
        data = self._opened(source, labelled=False)
        for doubt in data_warnings(data):
            self.note_once(f"calibration data {source.name}: {doubt}")
        return data

    @cached_property
    def evaluation(self) -> Dataset | None:
        """The evaluation data; ``None`` if the case has none."""
        source = self.case.inputs.evaluation
        return None if source is None else self._opened(source)

    def require_data(self) -> None:
        """Open the data of the case. Raises `DataError` if it is missing or does not fit the model."""
        _ = self.calibration, self.evaluation

    def _opened(self, source: DataSource, *, labelled: bool = True) -> Dataset:
        values = self.case.inputs.values
        data = open_data(source, self.inputs, fixed=values, labelled=labelled)
        for note in data.notes:
            self.note_once(f"{source.name}: {note}")
        for name in data.unused:
            self.note_once(f"{source.name}: array '{name}' is not used: the input is fixed to {values[name]}")
        return data

    @cached_property
    def scores(self) -> Scores:
        """Task metrics on the evaluation data."""
        return Scores(
            self.case, self.build_expected, lambda: self.evaluation, self._runner, note=self.note_once
        )

    def feeds(self) -> Iterator[Feed]:
        """Calibration inputs: the user's data, else random inputs from a seed, with a warning."""
        if self.calibration is not None:
            return iter(self.calibration)
        ranges, evaluation = self.case.inputs.scales, self.case.inputs.evaluation
        vague = [word for word, given in (("scales", ranges), ("parity", evaluation)) if given is None]
        if vague:
            prove = "proves" if vague == ["parity"] else "prove"
            self.note_once(
                f"no calibration data: random inputs are used, so {' and '.join(vague)} {prove} little"
            )
        shapes = {name: spec.shape for name, spec in self.inputs.items()}
        return iter(random_feeds(self.given, shapes, self._seed, RANDOM_SAMPLES))

    def comparison_data(self) -> tuple[Dataset | list[Feed], str]:
        """The best data for comparing outputs, and its kind: evaluation, calibration or random."""
        for data, kind in ((self.evaluation, "evaluation"), (self.calibration, "calibration")):
            if data is not None:
                return data, kind
        return list(self.feeds()), "random"

    @cached_property
    def definition(self) -> DefinitionEvidence | None:
        """The difference of the given model's run from its definition in ONNX; ``None`` if they cannot be compared."""
        feeds, data = self.comparison_data()
        found = compared_with_definition(self.given, feeds, self.backend, self.options)
        if found is not None and not found.holds:
            self.note_once(
                definition_warning(found, self.backend.name, data, is_quantized=is_quantized(self.given))
            )
        if self.quantized is not None:
            own = compared_with_definition(self.quantized.quantized, feeds, self.backend, self.options)
            if own is not None and not own.holds:
                model = "the quantized model as given"
                self.note_once(difference_text(own, self.backend.name, model, data))
        return found

    @cached_property
    def expected(self) -> Callable[[], Engine] | None:
        """Builds the model that computes the expected outputs, if the backend's run of the given model does not."""
        if self.definition is None or self.definition.holds:
            return None
        return Definition(self.given, self.backend, self.options).build

    def build_expected(self) -> Engine:
        """An engine of the expected outputs: the given model on the backend, or its definition where that differs."""
        return self.expected() if self.expected else self._runner(require_path(self.given))

    @cached_property
    def _runner(self) -> Callable[[Path], Engine]:
        """Builds the engines of comparisons. Kept, because those of another runtime live as long as this function."""
        return runner(self.backend, replace(self.options, hashed=False))

    @cached_property
    def sample(self) -> dict[str, Array]:
        """One input, in the shapes of the first profile: the first sample that has these, if one has them."""
        return feed_of_shapes(self.feeds, {name: spec.shape for name, spec in self.inputs.items()})

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The inputs for timing: `sample` in the shapes of every profile, with the profile's share."""
        profiles = self.case.inputs.profiles
        total = math.fsum(profile.weight for profile in profiles)
        shapes = [resolve_shapes(self.given, self.case.inputs, number) for number in range(len(profiles))]
        return tuple(
            Load(feeds=resized(self.sample, own), name=shapes_text(own), share=profile.weight / total)
            for profile, own in zip(profiles, shapes, strict=True)
        )

    @cached_property
    def shape_ranges(self) -> tuple[dict[str, InputShape], ...]:
        """The smallest, typical and largest shape of every input, for each profile."""
        inputs, found = self.case.inputs, []
        for number, profile in enumerate(shape_profiles(self.given, inputs)):
            usual = resolve_shapes(self.given, inputs, number)
            fixed = {name: InputShape.of(shape) for name, shape in usual.items()}
            found.append({**fixed, **profile.shapes})
        return tuple(found)

    def observed(self, tensors: Collection[str], feed: Feed) -> dict[str, Array]:
        """The values of these tensors in a run on ``feed``. Raises `BackendError` if they cannot be observed."""
        made = [tensor for tensor in tensors if tensor not in feed]
        values: Mapping[str, Array] = {}
        if made:
            observer = observe(self.model, made)
            with ExitStack() as observers:
                values = observer.seen(self.runner(observers, observer.parts)(feed))
        if missing := [tensor for tensor in made if tensor not in values]:
            raise BackendError(f"no run of the model returns '{missing[0]}'")
        return {tensor: feed[tensor] if tensor in feed else values[tensor] for tensor in tensors}

    def values_of(
        self, model: Model, tensors: Sequence[str], feeds: Iterable[Feed]
    ) -> Iterator[Mapping[str, Array]]:
        """The values of these tensors of a model for each input."""
        inputs = set(model.inputs)
        observer = observe(model, [tensor for tensor in tensors if tensor not in inputs])
        with ExitStack() as observers:
            execute = self.runner(observers, observer.parts) if observer.names else None
            for feed in feeds:
                found = {} if execute is None else observer.seen(execute(feed))
                yield {**{name: feed[name] for name in tensors if name in feed}, **found}

    @cached_property
    def calibrated(self) -> tuple[SchemeSpace, Quantizer]:
        """The candidates whose activations were all observed during calibration, and their numbers, not corrected."""
        space = self.candidates
        ranges = self._space_ranges(space)
        ranges |= {tensor: kept for tensor, kept in self.start_scales.ranges.items() if tensor in ranges}
        numbers = self.quantizer(space, ranges)
        self._note_sum_limits(numbers)
        return space.known(ranges.keys()), numbers

    def _note_sum_limits(self, numbers: Quantizer) -> None:
        """Note the weights that have more than 7 bits by calibration data, and not by a proof."""
        known = self.sum_limits
        sites = {site.tensor: site for site in _int8_weights(self.candidates) if site.tensor in known}
        wide = sum(overflows(known[name].layer, numbers.integer_weight(site)) for name, site in sites.items())
        if wide:
            margin = max(limit.margin for limit in known.values())
            self.note_once(
                f"{count_text(wide, 'int8 weight')} could overflow on this processor, whose sums of two 8-bit products "
                f"saturate, and {'has' if wide == 1 else 'have'} more than 7 bits: no sum overflows on calibration "
                f"data, with a margin of {margin:.0%}. Inputs that are larger than these may saturate"
            )

    def quantizer(
        self, space: SchemeSpace, ranges: Mapping[str, TensorRange], model: Model | None = None
    ) -> Quantizer:
        """The numbers of a space by the case's rules and the capabilities of the backend, not corrected.

        ``model`` replaces that of the space: an equalized one.
        """
        model = model or space.model
        tied = tie_ranges(model, ranges)
        numbers = Quantizer(
            model,
            tied,
            reduce_range=self.capabilities.reduce_range,
            symmetric_activations=self.capabilities.symmetric_activations,
            biases=space.bias_sources,
            saturations=saturations(model, tied, self._given_ranges(tied)),
            sum_limits=self._sum_limits(model, space),
        )
        kept = self.start_scales.weights
        if self.capabilities.reduce_range:
            kept = without_overflows(kept, numbers, self.note_once)
        return numbers.corrected(Corrections(weights=kept)) if kept else numbers

    @cached_property
    def sum_limits(self) -> Mapping[str, SumLimit]:
        """The limits of int8 weights by the sums of two products, by weight: on calibration data, or by a proof.

        None where such sums do not saturate, and without the correction ``bits``.
        """
        return self._sum_limits(self.folded, self.candidates)

    def _sum_limits(self, model: Model, space: SchemeSpace) -> Mapping[str, SumLimit]:
        """The limits of a model; those of the model before are known."""
        if self._limits is None or self._limits[0] is not model:
            self._limits = model, self._find_sum_limits(model, space)
        return self._limits[1]

    def _find_sum_limits(self, model: Model, space: SchemeSpace, samples: int = 16) -> Mapping[str, SumLimit]:
        """``samples`` are run at most: more of them show rarer sums, and take the time of a run each."""
        if not self.capabilities.reduce_range or "bits" not in self.case.quantize.allowed_corrections:
            return {}
        data = self.calibration
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
            observe=partial(self.values_of, model),
            formats=lambda tensor: tuple(sorted(formats.get(tensor, ()))),
        )
        try:
            return find_limits(islice(data or (), 0, step * samples, step))
        except BackendError as error:
            self.note_once(f"8-bit weights are used only where they are proved not to overflow: {error.what}")
            return find_limits(())

    def _given_ranges(self, tensors: Collection[str]) -> Collection[str]:
        """The tensors whose ranges are the user's, or those of a quantized model that the search starts from."""
        return tensors if self.case.inputs.scales is not None else self.start_scales.tensors

    def recalibrated(self, model: Model, tensors: Collection[str]) -> Quantizer:
        """The numbers of an equalized model, whose ranges differ at these tensors."""
        known = self.calibrated[1].ranges
        wanted = [tensor for tensor in tensors if tensor in known]
        ranges = {**known, **self.tensor_ranges(model, wanted)}
        return self.quantizer(self.candidates, ranges, model)

    def tensor_ranges(
        self,
        model: Model,
        tensors: Collection[str],
        feeds: Callable[[], Iterator[Feed]] | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> dict[str, TensorRange]:
        """The ranges of these tensors by the case's method, by default on all calibration inputs."""
        method = self.case.quantize.calibration
        with ExitStack() as observers:
            run = partial(self.runner, observers)
            return calibrate(model, tensors, feeds or self.feeds, method, run, note=note)

    def _space_ranges(self, space: SchemeSpace) -> dict[str, TensorRange]:
        """The range of each activation that may be quantized: from a file of scales, or from calibration."""
        given = self.case.inputs.scales
        if given is not None:
            return given_ranges(given, space.tensors, self.given.where, self.warnings.append)
        started = time.monotonic()
        found = self.tensor_ranges(self.folded, space.tensors, note=self.note_once)
        self.calibration_seconds = time.monotonic() - started
        return found

    @property
    def fixed_tensors(self) -> frozenset[str]:
        """The tensors whose numbers are those of a quantized model that the search starts from."""
        weights = self.calibrated[1].corrections.weights
        return frozenset((*self.start_scales.ranges, *(tensor for tensor, _, _ in weights)))

    @cached_property
    def start_scales(self) -> KeptScales:
        """The scales of the quantized models that the search starts from, if the case keeps them."""
        if self.case.quantize.scales != "keep":
            return KeptScales()
        return kept_scales(self._plain, self.case.tune.start_from, self.note_once)

    def keep_corrections(
        self, path: Path | None, run: Mapping[str, object], *, read_only: bool = False, finds: bool = True
    ) -> None:
        """Take the corrections from a file of the same ``run``; else find them, and write them to it.

        ``run`` describes model, data and rules. A file that is ``read_only`` is not written. Unless it ``finds``
        corrections, there are none without a file.
        """
        self._source = replace(self._source, file=path, run=run, writes=not read_only, finds=finds)

    @cached_property
    def corrections(self) -> FoundCorrections:
        """The corrections that help on held-out calibration data, and the gain of each."""
        return Correcting(self, self._source).corrections()

    def drop_corrections(self) -> None:
        """Apply none of the corrections, here and in a resumed search. Their gains are still known."""
        gains = tuple(replace(gain, taken=False) for gain in self.corrections.gains)
        self.corrections, self.numbers = FoundCorrections(gains=gains), self.calibrated[1]
        Correcting(self, self._source).keep(self.corrections)

    def seek_no_corrections(self) -> None:
        """Seek no corrections, here and in a resumed search."""
        self.corrections, self.numbers = FoundCorrections(), self.calibrated[1]
        Correcting(self, self._source).keep(self.corrections)

    def judge_corrections_at(self, first: Placement | None, excluded: frozenset[str] = frozenset()) -> None:
        """Judge corrections also at a placement that meets the limits without them; those already found stay.

        The units in ``excluded`` are too noisy for the limits, and stay in floating point.
        """
        self._source = replace(self._source, first=first, excluded=excluded)

    @property
    def may_correct(self) -> bool:
        """Whether corrections are possible: they are not without enough calibration data, for example."""
        return Correcting(self, self._source).samples >= MIN_SAMPLES

    def uncorrected(self) -> Prepared:
        """The same case without corrections. Other properties that are computed already are shared."""
        other = copy(self)
        other.corrections, other.numbers = FoundCorrections(), self.calibrated[1]
        return other

    @property
    def model(self) -> Model:
        """The folded model, equalized if that is an accepted correction."""
        return self.corrections.model or self.folded

    def equalized_for(self, placement: Placement) -> tuple[Equalization, ...]:
        """The factors of the channels that a placement quantizes; its model has no others."""
        return touched(self.folded, self.corrections.equalized, placement)

    @property
    def space(self) -> SchemeSpace:
        """The candidates whose activations were all observed during calibration."""
        return self.calibrated[0]

    @cached_property
    def numbers(self) -> Quantizer:
        """Scales, zero points and integer weights, with the accepted corrections applied."""
        found = self.corrections
        numbers = found.numbers or self.calibrated[1]
        return numbers.corrected(found.corrections) if any(gain.taken for gain in found.gains) else numbers

    def corrects(self, placement: Placement) -> bool:
        """Whether a candidate's model differs from that without corrections."""
        return self.model is not self.folded or not self.numbers.equals(self.calibrated[1], placement)

    def runner(self, observers: ExitStack, observer: Parts) -> Callable[[Feed], Mapping[str, Array]]:
        """A function that runs the observer, until ``observers`` are closed."""
        base = require_path(self.given).parent
        return self._observing.runner(
            observers, observer, base, cure=_GIVE_DATA if self.calibration is None else None
        )

    @cached_property
    def _observing(self) -> Observing:
        alone, note = self.capabilities.observes, self.note_once
        return Observing(self.given, self.backend, self.options, alone=alone, note=note)

    @property
    def nothing(self) -> str:
        """The reason why nothing can be searched; empty if something can."""
        if self.space.units:
            return ""
        if self.candidates.units:
            return "nothing in it can be quantized: no range was found for the activations that could be"
        by = "the spec's patterns exclude all of it"
        if self.case.patterns == PatternRules():
            by = "the backend runs none of its operators in integers"
        return f"nothing in it can be quantized: {by} (qdqspec inspect shows why, operator by operator)"

    def _warn_formats(self) -> None:
        """Warn of formats of the case that the search cannot use, with the reason."""
        rules, capabilities = self.case.quantize, self.capabilities
        chosen = [choice.format for choice in format_choices(rules, capabilities)]
        for name in rules.formats if len(rules.formats) > 1 else ():
            if name not in chosen:
                missing = capabilities.lacking.get(name)
                why = f"does not have it on this device{f' ({missing})' if missing else ''}"
                if name in capabilities.formats:
                    why = "stores it like another format of the case"
                rest = f"the search chooses among {', '.join(chosen)}"
                self.warnings.append(f"format {name} is left out: {self.backend.name} {why}; {rest}")

    def note_once(self, warning: str) -> None:
        """Add a warning unless it is already present."""
        if warning not in self.warnings:
            self.warnings.append(warning)


def _int8_weights(space: SchemeSpace) -> list[Site]:
    forms = (form for unit in space.units for form in unit.forms)
    return [site for form in forms for site in form.constants if site.format == "int8"]


def require_patterns(case: Case) -> None:
    """Raise `SpecError` listing every invalid pattern, with a caret under it."""
    wrong: list[PatternError] = []
    for text in (*case.patterns.allow, *case.patterns.deny):
        try:
            parse(text)
        except PatternError as error:
            wrong.append(error)
    if not wrong:
        return
    lines = _lines(case)
    problems = [problem for error in wrong if (problem := _problem(error, lines))]
    if case.spec is None or len(problems) < len(wrong):
        raise wrong[0]  # defined in Python, or escaped in YAML: the error's own caret is used
    raise spec_error(problems, lines, str(case.spec))


def _lines(case: Case) -> list[str]:
    if case.spec is None or case.spec.suffix == ".py" or not case.spec.is_file():
        return []
    return source_lines(case.spec.read_text(encoding="utf-8", errors="replace"))


def _problem(error: PatternError, lines: Sequence[str]) -> Problem | None:
    """The line and column of a pattern; ``None`` if no line contains it verbatim."""
    for number, line in enumerate(lines, 1):
        if (at := line.find(error.text)) >= 0:
            message = f"{error.what.removesuffix(', in the pattern')}, in the pattern '{error.text}'"
            return Problem(line=number, column=at + error.column, message=message)
    return None
