"""The identity of a search: the key of a finished one in the cache, and the header of a journal."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from qdqspec import __version__
from qdqspec._core.codec import to_data
from qdqspec.accuracy.sources import all_files
from qdqspec.timing.store import cache_key
from qdqspec.types import Data, DataSource

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

STATE_VERSION = 12  # raised when the meaning of an entry changes, which invalidates older entries


def search_key(prepared: Prepared) -> str:
    """The cache key of a finished search: model, data, rules, device, options and seed, but not the checks."""
    case, inputs, tune = prepared.case, prepared.case.inputs, prepared.case.tune
    asked = {name: to_data(getattr(case, name)) for name in ("patterns", "quantize", "tune")}
    regions = {**to_data(case.regions), "graph": data_digest(case.regions.graph)}
    data = [data_digest(inputs.calibration), data_digest(inputs.scales), _reference_score(prepared)]
    if tune.objective == "pareto" or tune.limits.min_sqnr_db is not None or tune.accuracy is not None:
        data.append(data_digest(inputs.evaluation))
    return cache_key(
        state=STATE_VERSION,
        model=prepared.given.sha256,
        data=data,
        device=prepared.device.key,
        options=dict(sorted(prepared.options.extra.items())),
        seed=prepared.settings.seed,
        shapes=to_data(inputs.profiles),
        batch=inputs.batch,
        regions=regions,
        **asked,
    )


def header_of(prepared: Prepared) -> dict[str, object]:
    """The header of the journal of a search; a journal with another header is not resumed."""
    score = _reference_score(prepared)
    return {
        "model_sha256": prepared.given.sha256,
        "model_nodes": prepared.node_digests,
        "search": prepared.key,
        "backend": prepared.backend.target,
        "device": prepared.device.key,
        "seed": prepared.settings.seed,
        "qdqspec": __version__,
        **({"accuracy": score} if score else {}),
    }


def _reference_score(prepared: Prepared) -> str:
    """The reference's score for an accuracy constraint; empty without one.

    The code of a metric has no digest; another metric is unlikely to give the same score to the same model.
    """
    rules = prepared.case.tune.accuracy
    if rules is None:
        return ""
    reference = prepared.scores.of_reference(rules.metric, rules.output).value
    return f"{rules.key} {reference:.9g} of the reference"


def data_digest(source: DataSource | None) -> str:
    """Hash of a data file, or of several in order of name, with the transform and names; empty for no data."""
    if source is None:
        return ""
    digest = hashlib.sha256()
    for file in all_files(source):
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    if isinstance(source, Data):
        digest.update(json.dumps([to_data(source.images), to_data(source.names)], sort_keys=True).encode())
        digest.update(b"labels" if source.labels is not None else b"")
    return digest.hexdigest()
