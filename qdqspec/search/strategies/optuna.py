"""Optuna's samplers over tied classes, in the extra ``[optuna]``.

For latency alone the tree-structured Parzen estimator (Bergstra et al., "Algorithms for Hyper-Parameter Optimization",
NeurIPS 2011), for latency and accuracy NSGA-II (Deb et al., "A fast and elitist multiobjective genetic algorithm", IEEE
Transactions on Evolutionary Computation 6, 2002), both as implemented by Optuna.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qdqspec.errors import ConfigError
from qdqspec.placement.space.search_space import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.search.labels import ClassLabels, TiedClass, gathered, pure_choices, spread, tied_classes
from qdqspec.search.select import reaches
from qdqspec.search.stepwise import Steps, Stepwise
from qdqspec.types import EXACT_DB, Trial

STARTUP = 10  # random trials before the estimator is used, ...
STARTUP_SHARE = 0.25  # ... and at most this share of the budget; the same for a generation of NSGA-II
REPEATS = 100  # consecutive known proposals after which the search ends


class OptunaSearch(Stepwise):
    """A study in memory. A proposal that resolves to a known placement is answered from memory, not built."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        classes = tied_classes(setup.space)
        study = _Study(classes, setup, int(random.integers(2**31)))
        super().__init__(self._search(classes, study), setup)

    @staticmethod
    def refuse(space: SchemeSpace) -> None:  # noqa: ARG004 - the seam's signature
        """Raise `ConfigError` if Optuna is not installed."""
        _optuna()

    def _search(self, classes: Sequence[TiedClass], study: _Study) -> Steps[None]:
        trials = yield self.first_proposals()
        trials += yield [Proposal(placement=each, phase="pure") for each in self.thinned_everything()]
        if not classes:
            return
        known = {trial.placement.digest: trial for trial in trials}
        starts = (gathered(classes, dict(seed.labels)) for seed in self.setup.seeds)
        study.enqueue([*pure_choices(self.space, classes), *starts])
        repeats = 0
        while repeats < REPEATS:
            asked, choice = study.ask()
            placement = self.space.resolve(spread(self.space, classes, choice))
            repeats += 1
            if not self.is_new(placement):
                study.tell(asked, known[placement.digest])
            elif not self.is_worth_building(placement):
                study.refuse(asked, self.guide.predicted_db(placement))
            else:
                (trial,) = yield [Proposal(placement=placement, phase="optuna")]
                known[placement.digest] = trial
                study.tell(asked, trial)
                repeats = 0


class _Study:
    """Optuna's study, in terms of choices and trials."""

    def __init__(self, classes: Sequence[TiedClass], setup: SearchSetup, seed: int) -> None:
        self._optuna = _optuna()
        self.setup = setup
        self._labels: Mapping[str, Any] = {
            str(index): self._optuna.distributions.CategoricalDistribution(tied.labels)
            for index, tied in enumerate(classes)
        }
        few = max(2, min(STARTUP, int(STARTUP_SHARE * setup.trials)))
        if setup.pareto:
            directions = ["minimize", "maximize"]
            sampler = self._optuna.samplers.NSGAIISampler(seed=seed, population_size=few)
        else:
            directions = ["minimize"]
            sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=few)
        self._study = self._optuna.create_study(sampler=sampler, directions=directions)

    def enqueue(self, choices: Sequence[ClassLabels]) -> None:
        """Queue these choices to be asked for first."""
        for choice in dict.fromkeys(choices):
            self._study.enqueue_trial(dict(zip(self._labels, choice, strict=True)))

    def ask(self) -> tuple[Any, ClassLabels]:
        """A choice to try, with Optuna's trial of it; `tell` or `refuse` reports its result."""
        asked = self._study.ask(self._labels)
        return asked, tuple(asked.params[name] for name in self._labels)

    def tell(self, asked: Any, trial: Trial) -> None:
        """Report the trial of a choice."""
        values = self._values(trial)
        if values is None:
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
            return
        if self.setup.min_sqnr_db is not None:
            asked.set_constraint("sqnr_db", self.setup.min_sqnr_db - _decibels(trial))
        self._study.tell(asked, values)

    def refuse(self, asked: Any, predicted_db: float | None) -> None:
        """Report a choice that was not built: no gain, and the predicted distance from the SQNR limit."""
        if self.setup.min_sqnr_db is not None and predicted_db is not None:
            asked.set_constraint("sqnr_db", self.setup.min_sqnr_db - predicted_db)
        self._study.tell(asked, [1.0])

    def _values(self, trial: Trial) -> list[float] | None:
        """The objectives; ``None`` for a failed trial. A trial below the limit of the task metric has no gain."""
        if not trial.ok or trial.ratio is None:
            return None
        accurate = reaches(trial, None, self.setup.min_accuracy)
        ratio = trial.ratio if accurate else max(1.0, trial.ratio)
        return [ratio, _decibels(trial)] if self.setup.pareto else [ratio]


def _decibels(trial: Trial) -> float:
    """A finite SQNR; the worst value if there is none."""
    return -EXACT_DB if trial.sqnr_db is None else max(-EXACT_DB, min(EXACT_DB, trial.sqnr_db))


def _optuna() -> Any:
    """The package, without its log output: the search reports its own progress."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "the strategy optuna needs the package optuna, which is not installed",
            cure="pip install 'qdqspec[optuna]', or choose another strategy",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


strategy = OptunaSearch
