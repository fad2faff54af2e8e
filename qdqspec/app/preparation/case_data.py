"""The data of a case: for calibration, for evaluation, and the inputs that are timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from qdqspec._core.arrays import Array, Feed
from qdqspec.accuracy.data import Dataset, data_warnings, feed_of_shapes, open_data, random_feeds
from qdqspec.accuracy.shapes import InputSpec, input_specs, resized, resolve_shapes, shapes_text
from qdqspec.graph.model import Model
from qdqspec.timing.profiles import Load
from qdqspec.types import Case, DataSource


class CaseData:
    """The inputs of a case for the model ``given``. Attributes are computed on first access.

    Random inputs are made from the ``seed``, so many ``random_samples``: more of them cover more values, and take
    longer. ``warnings`` collects notes for the user.
    """

    def __init__(self, case: Case, given: Model, seed: int, random_samples: int = 8) -> None:
        self.case, self.given, self.warnings = case, given, list[str]()
        self._seed, self._random_samples = seed, random_samples

    @cached_property
    def inputs(self) -> dict[str, InputSpec]:
        """Type and shape of every input in this case."""
        inputs = self.case.inputs
        return input_specs(self.given, resolve_shapes(self.given, inputs), inputs.profiles)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every input in the first profile."""
        return {name: spec.shape for name, spec in self.inputs.items()}

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

    def _opened(self, source: DataSource, *, labelled: bool = True) -> Dataset:
        data = open_data(source, self.inputs, fixed=self.case.inputs.values, labelled=labelled)
        for note in data.notes:
            self.note_once(f"{source.name}: {note}")
        return data

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
        return iter(random_feeds(self.given, self.shapes, self._seed, self._random_samples))

    def calibration_data(self) -> tuple[Dataset | list[Feed], str]:
        """Calibration inputs, and their kind: calibration or random."""
        return (
            (list(self.feeds()), "random") if self.calibration is None else (self.calibration, "calibration")
        )

    def comparison_data(self) -> tuple[Dataset | list[Feed], str]:
        """The best data for comparing outputs, and its kind: evaluation, calibration or random."""
        return self.calibration_data() if self.evaluation is None else (self.evaluation, "evaluation")

    @cached_property
    def sample(self) -> dict[str, Array]:
        """One input, in the shapes of the first profile: the first sample that has these, if one has them."""
        return feed_of_shapes(self.feeds, self.shapes)

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

    def note_once(self, warning: str) -> None:
        """Add a warning unless it is already present."""
        if warning not in self.warnings:
            self.warnings.append(warning)
