"""Prepares a case for tuning: load the model, fold it, calibrate it, and derive the space of placements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.config import claim_folder, find_folder
from qdqspec._core.units import count_text, names_text
from qdqspec.accuracy import CaseData, Scores
from qdqspec.accuracy.corrections import (
    FoundCorrections,
    find_sum_limits,
    note_wide_weights,
    read_found,
    without_overflows,
    write_found,
)
from qdqspec.app.preparation.correcting import find_branches, find_case_corrections
from qdqspec.app.preparation.runtimes import (
    Definition,
    Groups,
    Resources,
    compared_with_definition,
    definition_warning,
    difference_text,
    fused_groups,
    open_observer,
    reported_for,
    runner,
)
from qdqspec.app.preparation.start import float_form_of, with_float_form
from qdqspec.app.preparation.stored import header_of, search_key
from qdqspec.backends import Capabilities, Engine
from qdqspec.errors import PatternError, QdqspecError
from qdqspec.graph import (
    Model,
    cautions,
    digests_of,
    fold_weights,
    given_model,
    is_quantized,
    require_path,
    with_integer_kernels,
    with_outputs,
    with_true_outputs,
    with_types,
)
from qdqspec.graph.regions import find_regions, parse, select_nodes
from qdqspec.qdq import (
    Equalization,
    KeptScales,
    Quantizer,
    SchemeSpace,
    TensorRange,
    branches_of,
    calibrate_with,
    equalized,
    given_ranges,
    touched,
)
from qdqspec.spec import Problem, source_lines, spec_error
from qdqspec.timing import Load
from qdqspec.types import (
    Case,
    DefinitionEvidence,
    Method,
    PatternRules,
    Placement,
    Region,
)


def prepare(case: Case, resources: Resources, *, as_given: bool = False) -> Prepared:
    """Load the model of a case; a quantized one is tuned from its float form, unless it is taken ``as_given``."""
    given = given_model(case.model, case.inputs.values)
    given = given if as_given else with_float_form(given)
    data = CaseData(given, case.inputs).shaped()
    case = replace(case, inputs=data.inputs)
    own = float_form_of(given)
    if own is not None and not case.tune.start_from:
        case = replace(case, tune=replace(case.tune, start_from=(require_path(own.quantized),)))
    output = output_of(case, resources)
    options = replace(resources.options, profiles=data.profiles, state=output / resources.backend.name)

    def prepared_for(model: Model) -> Prepared:
        notes = (*data.notes, *cautions(model, searched=not as_given), *model.notes)
        return Prepared(case, model, replace(resources, options=options), output, notes=notes)

    prepared = prepared_for(given)
    if resources.settings.mode == "plan" or not prepared.capabilities.enforces_output_shapes:
        return prepared

    def run() -> Mapping[str, Array]:
        with closing(prepared.backend.build(require_path(given), prepared.options)) as engine:
            return engine.run(prepared.data.sample)

    try:  # the shapes that a run has, where the model declares others
        true = with_true_outputs(given, run)
    except QdqspecError:  # raised again when the model is run for its results
        return prepared
    return prepared if true is given else prepared_for(true)


def output_of(case: Case, resources: Resources) -> Path:
    """The output folder of a case; it is only looked up in mode ``plan``, which writes nothing."""
    settings = resources.settings
    return (find_folder if settings.mode == "plan" else claim_folder)(settings, case)


class Prepared:
    """A case with its model on a backend: the problem that a search solves. Attributes are computed on first access.

    Its models, each made from the one before:

    - ``given``: the user's model. ``quantized`` is its float form, if it has pairs.
    - ``base``: in float32, if it computes in float16 and the backend has no integer kernels for float16 pairs.
    - ``folded``: BatchNormalization folded, and branches that have factors.
    - ``model``: constants scaled, if equalization helps. Pairs are inserted here.

    ``data`` has the types and shapes of its inputs, and the samples that models are run on. Results are written to
    ``output``. ``warnings`` collects notes for the user.
    """

    def __init__(
        self,
        case: Case,
        given: Model,
        resources: Resources,
        output: Path = Path(),
        *,
        notes: Iterable[str] = (),
    ) -> None:
        self.case, self.given, self.warnings = case, given, list[str]()
        self.resources, self.output = resources, output
        self.backend, self.options, self.settings = resources.backend, resources.options, resources.settings
        self.data = CaseData(given, case.inputs, seed=self.settings.seed, notes=self.warnings)
        self.note_once = self.data.note
        self.quantized = float_form_of(given)
        self.base = given
        self.warnings += notes
        if given.float16_nodes:  # else the backend is not asked before its capabilities are needed
            self.base, note = with_integer_kernels(given, quantizes_half=self.capabilities.quantizes_half)
            self.warnings += [note] if note else []
        self._kept: tuple[Path, bool] | None = None  # see `keep_corrections`
        for name, value in case.inputs.values.items():
            self.note_once(
                f"input '{name}' is fixed to {value}: the tuned model has no such input; it is timed against the model "
                "specialized to that value, and its outputs are compared with those of the file given"
            )
        self._plain = fold_weights(self.base).model
        if case.quantize.dq_dtype is not None:
            self._plain = with_types(self._plain, case.quantize.dq_dtype)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The inputs for timing, in the shapes of every profile, with the profile's share."""
        return tuple(Load(feeds=feeds, share=share) for feeds, share in self.data.by_profile())

    @cached_property
    def node_digests(self) -> str:
        """The digests of the nodes of the model as given: with its pairs, if it is tuned from its float form."""
        return digests_of(self.given if self.quantized is None else self.quantized.quantized)

    key = cached_property(search_key)
    journal_header = cached_property(header_of)

    @cached_property
    def folded(self) -> Model:
        """The model without BatchNormalization, with products where factors of channels reduce the error."""
        changes = find_branches(self, self._plain)
        if changes:
            self.note_once(
                f"equalization inserts {count_text(len(changes), 'product')} with factors of channels between a "
                "normalization and the linear operators that read it"
            )
        return equalized(self._plain, changes)

    @property
    def converted_from(self) -> str:
        """The type of the user's model if candidates are in float32 instead of it; else empty."""
        return "" if self.base is self.given else self.base.converted_from

    @cached_property
    def capabilities(self) -> Capabilities:
        """The integer capabilities of the backend on this device."""
        return self.backend.capabilities(self.options)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the model, by the rules of the case."""
        return find_regions(self.folded, self.case.regions, groups=self.fused)

    @cached_property
    def fused(self) -> Groups:
        """Nodes of each kernel of the float model, if regions follow fusions."""
        return fused_groups(self) if self.case.regions.by == "fusion" else ()

    @cached_property
    def candidates(self) -> SchemeSpace:
        """All placements that the backend supports and the spec allows, before calibration."""
        require_patterns(self.case)
        selected = select_nodes(self.folded, self.case.patterns)
        for pattern in selected.unmatched:
            self.warnings.append(f"pattern '{pattern}' matches nothing in {self.given.where}")
        rules, able, products = self.case.quantize, self.capabilities, branches_of(self.folded).keys()
        space = SchemeSpace(
            self.folded,
            able,
            allowed=selected.allowed - products,
            denied=selected.denied | products,
            rules=rules,
        )
        chosen = [choice.format for choice in space.choices]
        for name in rules.formats if len(rules.formats) > 1 else ():
            if name not in chosen:
                missing = able.lacking.get(name)
                why = f"does not have it on this device{f' ({missing})' if missing else ''}"
                if name in able.formats:
                    why = "stores it like another format of the case"
                rest = f"the search chooses among {', '.join(chosen)}"
                self.warnings.append(f"format {name} is left out: {self.backend.name} {why}; {rest}")
        space.regions = self.regions  # whose notes follow those on formats
        return space

    @cached_property
    def scores(self) -> Scores:
        """Task metrics on the evaluation data."""
        return Scores(self.case, self.data, self.build_expected, self._runner)

    @cached_property
    def definition(self) -> DefinitionEvidence | None:
        """The difference of the given model's run from its definition in ONNX; ``None`` if they cannot be compared."""
        feeds, data = self.data.for_comparison()
        name = self.backend.name
        found = compared_with_definition(self.given, feeds, self.backend, self.options)
        if found is not None and not found.holds:
            self.note_once(definition_warning(found, name, data, is_quantized=is_quantized(self.given)))
        if self.quantized is not None:
            own = compared_with_definition(self.quantized.quantized, feeds, self.backend, self.options)
            if own is not None and not own.holds:
                self.note_once(difference_text(own, name, "the quantized model as given", data))
        return found

    @cached_property
    def expected(self) -> Callable[[], Engine] | None:
        """Builds the model that computes the expected outputs, if the backend's run of the given model does not."""
        is_computed = self.definition is None or self.definition.holds
        return None if is_computed else Definition(self.given, self.backend, self.options).build

    def build_expected(self) -> Engine:
        """An engine of the expected outputs: the given model on the backend, or its definition where that differs."""
        if self.expected:
            return self.expected()
        path = require_path(self.given)
        with reported_for(self.given, path, cure="`qdqspec lint` on it reports whether the runtime loads it"):
            return self._runner(path)

    @cached_property
    def _runner(self) -> Callable[[Path], Engine]:
        """Builds the engines of comparisons. Kept, because those of another runtime live as long as this function."""
        return runner(self.backend, replace(self.options, hashed=False))

    def values_of(
        self, model: Model, tensors: Sequence[str], feeds: Iterable[Feed]
    ) -> Iterator[Mapping[str, Array]]:
        """The values of these tensors of a model for each input."""
        inputs = set(model.inputs)
        observer = with_outputs(model, [tensor for tensor in tensors if tensor not in inputs])
        with ExitStack() as observers:
            execute = open_observer(self, observers, observer.proto) if observer.names else None
            for feed in feeds:
                found = {} if execute is None else observer.seen(execute(feed))
                yield {**{name: feed[name] for name in tensors if name in feed}, **found}

    @cached_property
    def calibrated(self) -> tuple[SchemeSpace, Quantizer]:
        """The candidates whose activations were all observed during calibration, and their numbers, not corrected."""
        space, given = self.candidates, self.case.inputs.scales
        if given is not None:
            ranges = given_ranges(given, space.tensors, self.given.where, self.warnings.append)
        else:
            found = self.tensor_ranges(self.folded, space.tensors, note=self.note_once)
            ranges = found[self.case.quantize.calibration]
        numbers = self._quantizer(self.folded, self.start_scales.replace_ranges(self.folded, ranges))
        kept = self.start_scales.ranges.items()
        if wider := [tensor for tensor, span in kept if numbers.ranges.get(tensor, span) != span]:
            why = "operators that copy or join values need one scale for all of them"
            self.note_once(f"scales of `start_from` that became larger, {names_text(wider)}: {why}")
        note_wide_weights(numbers, space, self.note_once)
        return space.known(ranges.keys()), numbers

    def _quantizer(self, model: Model, ranges: Mapping[str, TensorRange]) -> Quantizer:
        """The numbers of the folded model, or of an equalized one, by rules and capabilities, not corrected."""
        space, saturates, limits = self.candidates, self.capabilities.reduce_range, {}
        if saturates and "bits" in self.case.quantize.allowed_corrections:
            observe = partial(self.values_of, model)
            limits = find_sum_limits(model, space, observe, self.data.calibration, self.note_once)
        numbers = Quantizer.of_backend(
            model,
            ranges,
            self.capabilities,
            biases=space.bias_sources,
            # those of the user, or of a quantized model that the search starts from
            kept=ranges if self.case.inputs.scales is not None else self.start_scales.tensors,
            sum_limits=limits,
        )
        weights = self.start_scales.weights
        if saturates:
            weights = without_overflows(weights, numbers, self.note_once)
        return numbers.corrected(weights=weights) if weights else numbers

    def recalibrated(self, model: Model, tensors: Collection[str]) -> Quantizer:
        """The numbers of an equalized model, whose ranges differ at these tensors."""
        known = self.calibrated[1].ranges
        changed = self.tensor_ranges(model, [tensor for tensor in tensors if tensor in known])
        return self._quantizer(model, {**known, **changed[self.case.quantize.calibration]})

    def tensor_ranges(
        self,
        model: Model,
        tensors: Collection[str],
        *more: Method,
        every: int = 1,
        note: Callable[[str], None] = lambda _: None,
    ) -> dict[Method, dict[str, TensorRange]]:
        """The ranges of these tensors by the case's method and ``more``, on ``every`` so many calibration inputs."""
        with ExitStack() as observers:
            methods, run = {self.case.quantize.calibration, *more}, partial(open_observer, self, observers)
            return calibrate_with(
                model, tensors, lambda: islice(self.data.feeds(), 0, None, every), methods, run, note=note
            )

    @cached_property
    def start_scales(self) -> KeptScales:
        """The scales of the quantized models that the search starts from, if the case keeps them."""
        if self.case.quantize.scales != "keep":
            return KeptScales()
        return KeptScales.read(self._plain, self.case.tune.start_from, self.note_once)

    def keep_corrections(self, path: Path, *, read_only: bool = False) -> None:
        """Take the corrections from a file of the same search; else find them, and write them unless ``read_only``."""
        self._kept = path, read_only

    @cached_property
    def corrections(self) -> FoundCorrections:
        """The corrections that help on held-out calibration data, and the gain of each."""
        if self._kept is None:
            return find_case_corrections(self)
        path, read_only = self._kept
        known = read_found(path, self.journal_header, self.folded, self.recalibrated)
        found = known or find_case_corrections(self)
        if known is None and not read_only:
            write_found(path, self.journal_header, found)  # a resumed search has the same
        return found

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
        if not any(gain.taken for gain in found.gains):
            return numbers
        return numbers.corrected(ranges=found.ranges, biases=found.biases)

    @property
    def nothing(self) -> str:
        """The reason why nothing can be searched; empty if something can."""
        if self.space.units:
            return ""
        if self.candidates.units:
            return "nothing in it can be quantized: no range was found for the activations that could be"
        by = "the spec's patterns exclude all of it"
        if self.case.patterns == PatternRules():
            by = f"the backend quantizes none of its operators to {self.case.quantize.format}"
        return f"nothing in it can be quantized: {by} (qdqspec inspect shows why, operator by operator)"


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
    lines: Sequence[str] = ()
    if case.spec is not None and case.spec.suffix != ".py" and case.spec.is_file():
        lines = source_lines(case.spec.read_text(encoding="utf-8", errors="replace"))
    problems = []
    for each in wrong:
        number, at = next(
            ((n, line.find(each.text)) for n, line in enumerate(lines, 1) if each.text in line), (0, 0)
        )
        if case.spec is None or not number:
            raise wrong[0]  # defined in Python, or escaped in YAML: the error's own caret is used
        message = f"{each.what.removesuffix(', in the pattern')}, in the pattern '{each.text}'"
        problems.append(Problem(line=number, column=at + each.column, message=message))
    raise spec_error(problems, lines, str(case.spec))
