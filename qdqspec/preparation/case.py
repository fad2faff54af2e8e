"""A case on its backend: model, data, output folder, and the resources that it shares with other cases."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from qdqspec import __version__
from qdqspec.arrays import Array
from qdqspec.config import claim_folder, find_folder
from qdqspec.errors import QdqspecError
from qdqspec.graph.declared import unconfirmed_outputs
from qdqspec.graph.digests import digests_of
from qdqspec.graph.given import OwnCopy, fixed_in, given_model, with_true_outputs
from qdqspec.graph.model import Model, require_path
from qdqspec.measurement.lock import RunLock
from qdqspec.parity.data import shaped_by_data
from qdqspec.parity.shapes import shape_profiles
from qdqspec.preparation.cached import NODES, data_digest, key_of
from qdqspec.preparation.candidates import half_reference, note_float_types, plain_file
from qdqspec.preparation.files import REFERENCE
from qdqspec.preparation.float_form import float_form_of, with_float_form
from qdqspec.preparation.prepare import Prepared
from qdqspec.preparation.resources import Resources
from qdqspec.preparation.timing import BUILDS, ROUNDS, time_files
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import FLOAT32, Case, DeviceKey, LatencyEvidence


class CaseSetup:
    """Inputs of all work on a case. Each attribute is computed once, on first access.

    A quantized model is tuned from its float form, unless it is taken ``as_given``.
    """

    def __init__(
        self, case: Case, resources: Resources, device: DeviceKey, *, as_given: bool = False
    ) -> None:
        self.case = case
        self.device = device
        self.settings = resources.settings
        self.backend = resources.backend
        self._shared = resources
        self._as_given = as_given
        self._prepared: Prepared | None = None

    def as_given(self) -> CaseSetup:
        """The same for comparisons with the model as it is, also if it is quantized."""
        return CaseSetup(self.case, self._shared, self.device, as_given=True)

    @cached_property
    def given(self) -> Model:
        """The model to tune: the user's, or a copy: its float form, or with fixed inputs or corrected declarations."""
        model = given_model(self.case.model, self.case.inputs.values)
        if not self._as_given:
            model = with_float_form(model)
        if self.settings.mode == "plan" or not unconfirmed_outputs(model):
            return model
        if not self.backend.capabilities(self._shared.options).enforces_output_shapes:
            return model
        try:
            return with_true_outputs(model, self._run_once(model))
        except QdqspecError:  # raised again when the model is run for its results
            return model

    def _run_once(self, model: Model) -> Mapping[str, Array]:
        inputs = shaped_by_data(model, self.case.inputs)
        options = replace(self._shared.options, profiles=shape_profiles(model, inputs))
        trial = Prepared(replace(self.case, inputs=inputs), model, self.backend, options, self.settings.seed)
        with closing(self.backend.build(require_path(model), options)) as engine:
            return engine.run(trial.sample)

    @cached_property
    def node_digests(self) -> str:
        """The digests of the nodes of the model as given: with its pairs, if it is tuned from its float form."""
        own = float_form_of(self.given)
        return digests_of(self.given if own is None else own.quantized)

    @property
    def fixed(self) -> Mapping[str, Array]:
        """Inputs with a fixed value, which the user's own model is fed in addition to the data if it is compared."""
        return {} if float_form_of(self.given) else fixed_in(self.given)

    @property
    def reference(self) -> Path:
        """A file of the reference that outlives the session: the user's, or the copy among the results."""
        return self.output / REFERENCE if isinstance(self.given, OwnCopy) else require_path(self.given)

    @cached_property
    def _shaped(self) -> Case:
        """The case with all shapes that are declared or follow from its data, and the start that a given model is."""
        case = replace(self.case, inputs=shaped_by_data(self.given, self.case.inputs))
        own = float_form_of(self.given)
        if own is None or case.tune.start_from:
            return case
        return replace(case, tune=replace(case.tune, start_from=(own.file,)))

    @cached_property
    def resources(self) -> Resources:
        """The resources with the shapes of this case and a state folder shared by its builds."""
        options = replace(
            self._shared.options,
            profiles=shape_profiles(self.given, self._shaped.inputs),
            state=self.output / self.backend.name,
        )
        return replace(self._shared, options=options)

    @property
    def prepared(self) -> Prepared:
        """The model, prepared for tuning."""
        if self._prepared is None:
            options, seed = self.resources.options, self.settings.seed
            self._prepared = Prepared(self._shaped, self.given, self.backend, options, seed)
        return self._prepared

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes of the preparation so far; empty if it has not begun."""
        return () if self._prepared is None else tuple(self._prepared.warnings)

    @cached_property
    def output(self) -> Path:
        """The output folder of the case."""
        writes = self.settings.mode != "plan"
        return claim_folder(self.settings, self.case) if writes else find_folder(self.settings, self.case)

    @property
    def target(self) -> str:
        """Backend and variant of the case."""
        return self.backend.target

    @property
    def about(self) -> dict[str, str]:
        """Names of case, model, device and target, for a cache entry."""
        device, target = self.device.key, self.target
        names = {"case": self.case.name, "model": self.given.where, "device": device, "target": target}
        return names | {NODES: self.node_digests}

    @cached_property
    def key(self) -> str:
        """The cache key of a finished search of this case."""
        words = sorted(self._shared.options.extra.items())  # other build options mean another search
        return key_of(
            self.case,
            self.given.sha256,
            " ".join([*self._data, *self._constraint_digests]),
            " ".join([self.device.key, *(f"{word}={text}" for word, text in words)]),
            self.settings.seed,
        )

    @property
    def _data(self) -> tuple[str, ...]:
        """Digests of the data that calibrates pairs, and of the data that an SQNR limit is measured on."""
        inputs, tune = self.case.inputs, self.case.tune
        scales = (f"scales {data_digest(inputs.scales)}",) if inputs.scales is not None else ()
        measures_db = tune.objective == "pareto" or tune.limits.min_sqnr_db is not None
        decides = inputs.evaluation is not None and measures_db
        evaluation = (f"evaluation {data_digest(inputs.evaluation)}",) if decides else ()
        return data_digest(inputs.calibration), *scales, *evaluation

    @property
    def journal_header(self) -> dict[str, object]:
        """The header of the search's journal; a journal with another header is not resumed."""
        return {
            "model_sha256": self.given.sha256,
            "model_nodes": self.node_digests,
            "search": self.key,
            "backend": self.target,
            "device": self.device.key,
            "seed": self.settings.seed,
            "qdqspec": __version__,
            **({"accuracy": self._constraint_digests[0]} if self._constraint_digests else {}),
        }

    @cached_property
    def _constraint_digests(self) -> tuple[str, ...]:
        """The parts of the cache key that belong to an accuracy constraint: the reference's score and the data.

        The code of a metric has no digest; another metric is unlikely to give the same score to the same model.
        """
        rules = self.case.tune.accuracy
        if rules is None:
            return ()
        reference = self.prepared.scores.of_reference(rules.metric, rules.output).value
        score = f"{rules.key} {reference:.9g} of the reference"
        return score, data_digest(self.case.inputs.evaluation)

    def alone(self) -> AbstractContextManager[object]:
        """A lock on the output folder; a second run waits, then uses the results."""
        return RunLock(self.output, self._shared.report_wait)

    def timed(self, tuned: Path, builds: int = BUILDS, rounds: int = ROUNDS) -> LatencyEvidence:
        """Time the given model and another with the same inputs, interleaved, from fresh builds.

        The given model in float16 is timed too, if `half_reference` can make it, and in float32 if candidates are.
        """
        files = {"reference": require_path(self.given), "tuned": tuned}
        loads, rules = self.prepared.loads, self.case.tune
        with TemporaryFolder() as folder:
            files |= half_reference(self.prepared, folder)
            if self.prepared.is_converted:
                files[FLOAT32] = plain_file(self.prepared, folder)
            measured = time_files(self.resources, files, loads, rules, builds=builds, rounds=rounds)
        note_float_types(self.prepared, measured)
        return measured
