"""Optuna's samplers over tied units, in the extra ``[optuna]``.

For latency alone the tree-structured Parzen estimator (Bergstra et al., "Algorithms for Hyper-Parameter Optimization",
NeurIPS 2011), for latency and accuracy NSGA-II (Deb et al., "A fast and elitist multiobjective genetic algorithm", IEEE
Transactions on Evolutionary Computation 6, 2002), both as implemented by Optuna.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from qdqspec.errors import ConfigError
from qdqspec.qdq import SchemeSpace
from qdqspec.search.base import Proposal, SearchSetup, Steps, Stepwise
from qdqspec.search.blocks import block_codes, labels_of, tie, uniform_codes
from qdqspec.types import EXACT_DB, Trial


class OptunaSearch(Stepwise):
    """A study in memory. A proposal that resolves to a known placement is answered from memory, not built.

    The first ``startup`` trials, and at most ``startup_share`` of the budget, are random: more explore more; a
    generation of NSGA-II has as many. The search ends after ``repeats`` known proposals in a row.
    """

    startup: ClassVar[int] = 10
    startup_share: ClassVar[float] = 0.25
    repeats: ClassVar[int] = 100

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        optuna, seed = _optuna(), int(random.integers(2**31))
        few = max(2, min(self.startup, int(self.startup_share * setup.trials)))
        if setup.pareto:
            sampler = optuna.samplers.NSGAIISampler(seed=seed, population_size=few)
        else:
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=few)
        directions = ["minimize", "maximize"] if setup.pareto else ["minimize"]
        self._study = optuna.create_study(sampler=sampler, directions=directions)
        self._optuna = optuna
        super().__init__(setup, random)

    @staticmethod
    def refuse(space: SchemeSpace) -> None:  # noqa: ARG004 - the seam's signature
        """Raise `ConfigError` if Optuna is not installed."""
        _optuna()

    def _search(self) -> Steps[None]:
        yield self.fitted_everything()
        space, blocks = self.space, tie(self.space)
        known = {trial.placement: trial for trial in (*self.trials, *self.failed)}
        choices = {
            str(block.index): self._optuna.distributions.CategoricalDistribution(block.codes)
            for block in blocks
        }
        seeds = (block_codes(space, blocks, dict(seed.labels)).tolist() for seed in self.setup.seeds)
        for codes in dict.fromkeys([*uniform_codes(space, blocks), *map(tuple, seeds)]):
            self._study.enqueue_trial(dict(zip(choices, codes, strict=True)))
        repeats = 0 if blocks else self.repeats
        while repeats < self.repeats:
            asked = self._study.ask(choices)
            codes = tuple(asked.params[name] for name in choices)
            placement = space.resolve(labels_of(space, blocks, codes))
            repeats += 1
            if not self.is_new(placement):
                self._tell(asked, known[placement])
            elif not self.is_worth_building(placement):
                self._study.tell(asked, [2.0, -EXACT_DB][: len(self._study.directions)])
            else:
                (trial,) = yield [Proposal(placement=placement, phase="optuna")]
                known[placement] = trial
                self._tell(asked, trial)
                repeats = 0

    def _tell(self, asked: Any, trial: Trial) -> None:
        """Report the trial of a choice; one that does not meet the limits is slower than all others."""
        if not trial.ok or trial.ratio is None:
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
            return
        ratio = trial.ratio if self.setup.limits.admits(trial.placement) else trial.ratio + 1.0
        sqnr_db = (
            -EXACT_DB if trial.sqnr_db is None else max(-EXACT_DB, min(EXACT_DB, trial.sqnr_db))
        )  # finite
        self._study.tell(asked, [ratio, sqnr_db][: len(self._study.directions)])


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
