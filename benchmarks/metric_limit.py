"""The options of a search that may lose 1 % of a model's agreement with float, for `accuracy.py` and `ablation.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from independent import Feed, Outputs, outputs
from measured import agreement_of
from real_data import RealModel

METRIC, DROP = "metric -1 %", 0.01


def metric_options(model: RealModel, labelled: Path) -> dict[str, Any]:
    """Options of `qdqspec.tune`; the evaluation data with labels is written to the file ``labelled``."""
    feeds = model.feeds()
    wanted = list(outputs(model.path, feeds))
    _write_labelled(model, labelled, len(feeds))
    metrics = {"agreement": _metric(model, wanted, feeds)}
    return {"metrics": metrics, "evaluation": labelled, "metric": "agreement", "max_drop": DROP}


def _write_labelled(model: RealModel, path: Path, count: int) -> None:
    """Write the evaluation data with the index of each sample as its label."""
    assert model.evaluation is not None
    with np.load(model.evaluation) as arrays:  # noqa: TID251 - closed here
        data = {name: arrays[name][:count] for name in arrays.files if name != "labels"}
    np.savez(path, labels=np.arange(count), **data)


def _metric(
    model: RealModel, wanted: Sequence[Outputs], feeds: Sequence[Feed]
) -> Callable[[Mapping[str, Any], Any], float]:
    """Agreement with the float model as a user metric; labels are the indices of samples."""

    def metric(found: Mapping[str, Any], labels: Any) -> float:
        made = [
            {name: np.asarray(found[name][i]).reshape(array.shape) for name, array in wanted[n].items()}
            for i, n in enumerate(labels)
        ]
        value = agreement_of(model, [wanted[n] for n in labels], made, [feeds[n] for n in labels])
        assert value is not None
        return value

    return metric
