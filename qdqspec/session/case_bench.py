"""One case on its backend: model, data, folder, and how files of it are run and timed. Part of the session."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from qdqspec import __version__
from qdqspec.backends.base import Array, Engine
from qdqspec.config import claim_folder, find_folder
from qdqspec.errors import QdqspecError
from qdqspec.graph.declared import unconfirmed_outputs
from qdqspec.graph.given import OwnCopy, fixed_in, given_model, with_true_outputs
from qdqspec.graph.model import Model
from qdqspec.measure.lock import RunLock
from qdqspec.parity.data import shaped_by_data
from qdqspec.parity.shapes import shape_profiles
from qdqspec.session.files import REFERENCE, BuildLogs
from qdqspec.session.half import ROLE, half_reference, note_half
from qdqspec.session.kept import data_digest, key_of
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.session.timing import BUILDS, ROUNDS, time_files
from qdqspec.session.tuning import MakeStrategy, Tuning
from qdqspec.session.workbench import Workbench
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import Case, DeviceKey, LatencyEvidence

_DECLARES = (
    "onnxruntime"  # the backend that holds a run to declared shapes, where it is given the outputs' memory
)


class CaseBench:
    """What all work on a case starts from. Reading an attribute does the work it takes, once."""

    def __init__(self, case: Case, bench: Workbench, device: DeviceKey) -> None:
        self.case = case
        self.device = device
        self.settings = bench.settings
        self.backend = bench.backend
        self._given_bench = bench

    @cached_property
    def given(self) -> Model:
        """The model that is tuned: the user's, or a copy, with inputs fixed or declared outputs corrected."""
        model = given_model(self.case.model, self.case.inputs.values)
        if self.settings.mode == "plan" or self.backend.name != _DECLARES or not unconfirmed_outputs(model):
            return model
        try:
            return with_true_outputs(model, self._run_once(model))
        except QdqspecError:  # raised again where the model is run for its own sake
            return model

    def _run_once(self, model: Model) -> Mapping[str, Array]:
        inputs = shaped_by_data(model, self.case.inputs)
        options = replace(self._given_bench.options, profiles=shape_profiles(model, inputs))
        trial = Prepared(replace(self.case, inputs=inputs), model, self.backend, options, self.settings.seed)
        with closing(self.backend.build(require_path(model), options)) as engine:
            return engine.run(trial.sample)

    @property
    def fixed(self) -> Mapping[str, Array]:
        """What the user's own model is fed beside the data: the inputs that the case gives a value."""
        return fixed_in(self.given)

    @property
    def reference(self) -> Path:
        """A file of the reference that is there after the session: the user's, or that of the results."""
        return self.output / REFERENCE if isinstance(self.given, OwnCopy) else require_path(self.given)

    @cached_property
    def _shaped(self) -> Case:
        """The case with every shape that is declared or that its data tells."""
        return replace(self.case, inputs=shaped_by_data(self.given, self.case.inputs))

    @cached_property
    def work(self) -> Workbench:
        """The workbench, with the shapes of this case and a folder beside its results for what builds share."""
        options = replace(
            self._given_bench.options,
            profiles=shape_profiles(self.given, self._shaped.inputs),
            state=self.output / self.backend.name,
        )
        return replace(self._given_bench, options=options)

    @cached_property
    def prepared(self) -> Prepared:
        """The model with what tuning needs."""
        return Prepared(self._shaped, self.given, self.backend, self.work.options, self.settings.seed)

    @cached_property
    def output(self) -> Path:
        """The folder of the case's files."""
        writes = self.settings.mode != "plan"
        return claim_folder(self.settings, self.case) if writes else find_folder(self.settings, self.case)

    @property
    def target(self) -> str:
        """Backend and variant that the case runs on."""
        return self.backend.target

    @cached_property
    def key(self) -> str:
        """What a finished search of this case is kept by."""
        words = sorted(self._given_bench.options.extra.items())  # another way to build is another search
        return key_of(
            self.case,
            self.given.sha256,
            " ".join([*self._data, *self._held_to]),
            " ".join([self.device.key, *(f"{word}={text}" for word, text in words)]),
            self.settings.seed,
        )

    @property
    def _data(self) -> tuple[str, ...]:
        """What the numbers of pairs come from, and the data that an SQNR limit is measured on."""
        inputs, tune = self.case.inputs, self.case.tune
        scales = (f"scales {data_digest(inputs.scales)}",) if inputs.scales is not None else ()
        measures_db = tune.objective == "pareto" or tune.limits.min_sqnr_db is not None
        decides = inputs.evaluation is not None and measures_db
        evaluation = (f"evaluation {data_digest(inputs.evaluation)}",) if decides else ()
        return data_digest(inputs.calibration), *scales, *evaluation

    @property
    def journal_header(self) -> dict[str, object]:
        """What makes a search of this case another one: a journal with another header is not gone on with."""
        return {
            "model_sha256": self.given.sha256,
            "search": self.key,
            "backend": self.target,
            "device": self.device.key,
            "seed": self.settings.seed,
            "qdqspec": __version__,
            **({"accuracy": self._held_to[0]} if self._held_to else {}),
        }

    @cached_property
    def _held_to(self) -> tuple[str, ...]:
        """What a search held to a task metric depends on besides its rules: the reference's score, and the data.

        The code of a metric has no digest, but another metric would hardly give the same model the same score.
        """
        rules = self.case.tune.accuracy
        if rules is None:
            return ()
        reference = self.prepared.scores.of_reference(rules.metric, rules.output).value
        said = f"{rules.key} {reference:.9g} of the reference"
        return said, data_digest(self.case.inputs.evaluation)

    def alone(self) -> AbstractContextManager[object]:
        """One run in the folder; a later one waits and finds the work done."""
        return RunLock(self.output, self._given_bench.report_wait)

    def tuning(self, journal: BuildLogs, make: MakeStrategy, name: str) -> Tuning:
        """The search of this case by a strategy, to be stepped through."""
        return Tuning(self.prepared, self.work, journal, make=make, name=name)

    def timed(self, tuned: Path, builds: int = BUILDS, rounds: int = ROUNDS) -> LatencyEvidence:
        """The model given and another that takes the same inputs, from fresh builds, interleaved.

        The model given in float16 is timed beside them where `half_reference` has one.
        """
        files = {"reference": require_path(self.given), "tuned": tuned}
        loads, rules = self.prepared.loads, self.case.tune
        with TemporaryFolder() as folder:
            half = half_reference(self.prepared, folder)
            files |= {} if half is None else {ROLE: half}
            measured = time_files(self.work, files, loads, rules, builds=builds, rounds=rounds)
        note_half(self.prepared, measured)
        return measured

    def engine(self, path: Path) -> AbstractContextManager[Engine]:
        """A model file, built to be run; closed at the end of the block."""
        return closing(self.backend.build(path, self.work.options))
