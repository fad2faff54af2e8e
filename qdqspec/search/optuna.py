"""Optuna's tree-structured Parzen estimator over tied classes, in the extra ``[optuna]``. Floors 0 to 3.

Source: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011, as implemented by Optuna.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qdqspec.errors import ConfigError
from qdqspec.search._classes import Choice, TiedClass, gathered, pure_choices, spread, tied_classes
from qdqspec.search._steps import Steps, Stepwise
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.types import Trial

STARTUP = 10  # random trials before the estimator speaks, ...
STARTUP_SHARE = 0.25  # ... and at most this share of the budget
REPEATS = 100  # proposals in a row that were built before: then there is nothing new to find


class OptunaSearch(Stepwise):
    """A study in memory. What resolves to a placement that was built is answered from memory, not built."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self._space = setup.space
        self._classes = tied_classes(setup.space)
        self._known: dict[str, float | None] = {}  # ratio by placement; `None`: it failed
        seed = int(random.integers(2**31))
        startup = min(STARTUP, int(STARTUP_SHARE * setup.trials))
        super().__init__(self._search(setup.seeds, _Study(self._classes, seed, startup)))

    def _search(self, seeds: Sequence[Any], study: _Study) -> Steps:
        reference = Proposal(placement=self._space.resolve({}), phase="pure", profile=True)
        proposals = [reference, *(Proposal(placement=seed, phase="seed") for seed in seeds)]
        self._remember((yield proposals))
        starts = [*pure_choices(self._classes), *(gathered(self._classes, dict(s.labels)) for s in seeds)]
        study.enqueue(starts)
        for choice in study.choices(REPEATS) if self._classes else ():
            placement = self._space.resolve(spread(self._space, self._classes, choice))
            is_new = self.is_new(placement)
            if is_new:
                self._remember((yield [Proposal(placement=placement, phase="optuna")]))
            study.tell(self._known.get(placement.digest), is_new=is_new)

    def _remember(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._known[trial.placement.digest] = trial.ratio if trial.ok else None


class _Study:
    """Optuna's study, in terms of choices."""

    def __init__(self, classes: Sequence[TiedClass], seed: int, startup: int) -> None:
        self._optuna = _optuna()
        self._labels: Mapping[str, Any] = {
            str(index): self._optuna.distributions.CategoricalDistribution(tied.labels)
            for index, tied in enumerate(classes)
        }
        sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
        self._study = self._optuna.create_study(sampler=sampler)
        self._trial: Any = None
        self._repeats = 0

    def enqueue(self, choices: Sequence[Choice]) -> None:
        """Have these asked for first."""
        for choice in dict.fromkeys(choices):
            self._study.enqueue_trial(dict(zip(self._labels, choice, strict=True)))

    def choices(self, repeats: int) -> Iterator[Choice]:
        """What to try; `tell` has to follow each. Ends after so many in a row that were not new."""
        while self._repeats < repeats:
            self._trial = self._study.ask(self._labels)
            yield tuple(self._trial.params[name] for name in self._labels)

    def tell(self, ratio: float | None, *, is_new: bool) -> None:
        """How the last choice fared; ``None`` where it failed."""
        self._repeats = 0 if is_new else self._repeats + 1
        if ratio is None:
            self._study.tell(self._trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(self._trial, ratio)


def _optuna() -> Any:
    """The package, silenced: the search has its own progress."""
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
