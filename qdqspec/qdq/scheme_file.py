"""`scheme.json`: a placement with its numbers, to store, transfer and apply again.

A file that is damaged, or not a scheme, is rejected with its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qdqspec._core.files import write_text
from qdqspec._core.records import TooLargeError, content_sum, problem_text, read_json, record_of
from qdqspec._core.units import names_text
from qdqspec.errors import ConfigError, PlacementError, StateError
from qdqspec.graph import Model, in_float32, with_types
from qdqspec.qdq.chains import EQUALIZATIONS, Equalization
from qdqspec.qdq.formats import number_format
from qdqspec.qdq.insert import ChangedModel, insert_qdq
from qdqspec.qdq.match import fit_scheme, shape_of
from qdqspec.qdq.quantizer import in_type_of, params_of
from qdqspec.types import Consumer, PlacedPair, Placement, Site

SCHEMA_VERSION = 1

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_MOST_BYTES = 256 * 2**20  # a site takes some hundred bytes; schemes are far smaller
IMPORTED = "imported"  # as a backend: the scheme comes from a model that another tool quantized
_CURE = "write it again with `qdqspec tune`; after an edit by hand, delete its digest"


@dataclass(frozen=True, kw_only=True)
class SchemeFile:
    """Content of a scheme file: the backend it was made for, and the sites with their numbers, each once.

    ``positions`` are those of the nodes that read the sites, if the file has them: see `match.positions`.
    ``dq_dtype`` is the type of tensors whose type the model does not state. The numbers are those of a model with the
    factors ``equalized``, which was ``converted_from`` float16 to float32 if that is set. ``path`` is the file that the
    scheme was read from.
    """

    backend: str
    pairs: tuple[PlacedPair, ...]
    equalized: tuple[Equalization, ...] = ()
    positions: Mapping[str, str] = field(default_factory=dict)
    dq_dtype: str | None = None
    converted_from: str | None = None
    path: Path | None = field(default=None, compare=False)

    @cached_property
    def placement(self) -> Placement:
        """The sites without numbers."""
        return Placement(sites=frozenset(pair.site for pair in self.pairs))

    @staticmethod
    def read(path: Path) -> SchemeFile:
        """Read a scheme file. Raises `StateError` naming the file if it is missing, damaged or not a scheme."""
        try:
            content = read_json(path, most_bytes=_MOST_BYTES)
        except OSError as error:
            raise StateError(
                f"the scheme cannot be read: {error.strerror}", where=path, cure="check the path"
            ) from None
        except TooLargeError as error:
            raise StateError(f"this is too large to be a scheme: {error}", where=path, cure=_CURE) from None
        except ValueError as error:
            raise StateError(f"the scheme is not JSON: {error}", where=path, cure=_CURE) from None
        return _check_content(content, path)

    def write(self, path: Path) -> None:
        """Write a scheme atomically, one line per site. Raises `OutputError` if the file cannot be written."""
        ordered = sorted(self.pairs, key=lambda pair: (pair.site.tensor, pair.site.consumers))
        records: list[dict[str, object]] = []
        for pair in ordered:
            site, single, at = pair.site, pair.site.axis is None, self.positions
            record: dict[str, object] = {
                "tensor": site.tensor,
                "consumers": [
                    end._asdict() | ({"position": at[end.node]} if end.node in at else {})
                    for end in site.consumers
                ],
                "format": site.format,
                "scale": pair.scale[0] if single else pair.scale,
                "zero_point": pair.zero_point[0] if single else pair.zero_point,
                "axis": site.axis,
                "weight": site.weight,
            }
            record |= {} if pair.outer is None else {"outer": pair.outer}
            record |= {"rounding": pair.rounding} if pair.rounding else {}
            record |= {"bias": pair.bias} if pair.bias else {}
            record |= {} if pair.stored else {"stored": False}
            records.append(record)
        channels = [change.record for change in self.equalized]
        head = {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "digest": self.placement.digest,
            "sum": _sum(self.backend, records, channels),
        } | ({} if self.dq_dtype is None else {"dq_dtype": self.dq_dtype})
        head |= {} if self.converted_from is None else {"converted_from": self.converted_from}
        head |= {"equalized": channels} if channels else {}
        sites = ",\n  ".join(map(json.dumps, records))
        write_text(path, f'{json.dumps(head)[:-1]}, "sites": [\n  {sites}\n]}}\n')

    def apply(self, model: Model) -> ChangedModel:
        """The model with the pairs and numbers of the scheme.

        The model is converted from float16 and folded as in tuning, unless more sites fit it without folding. Sites are
        matched as `qdqspec.qdq.match` describes. Those that do not fit are omitted and noted; if none fits, or the
        model cannot have the factors of the scheme, `PlacementError` is raised.
        """
        typed, converted = model, list[str]()
        if self.converted_from is not None and model.float16_nodes:
            typed = in_float32(model)
            converted = [f"converted from {self.converted_from} to float32, as tuning does"]
        typed = typed if self.dq_dtype is None else with_types(typed, self.dq_dtype)
        fitted = fit_scheme(typed, self.pairs, self.positions, self.equalized)
        prepared, notes = fitted.model, [*fitted.notes]
        if not self.pairs:
            notes.append("the scheme has no sites: no pair is inserted")
        if self.pairs and not fitted.pairs:
            first, reason = next(iter(fitted.reasons.items()))
            raise PlacementError(
                f"none of the {len(self.pairs)} sites fits; the first, tensor '{first}': {reason}",
                where=self.path,
                cure=f"apply it to the model it was made for, not to {model.where}",
            )
        if fitted.moved:
            moved = names_text(fitted.moved)
            notes.append(f"found by the nodes that read them, {moved}: this model names them otherwise")
        if fitted.reasons:
            first, reason = next(iter(fitted.reasons.items()))
            many = f"{names_text(fitted.reasons)}; " if len(fitted.reasons) > 1 else ""
            notes.append(f"left out {many}'{first}': {reason}")
        if fitted.reasons and self.backend == IMPORTED:
            how = "import the quantized model again with `--reference` and this model"
            notes.append(f"to place the omitted sites, {how}")
        rounded = []
        for site, params in (
            (pair.site, params_of(pair, shape_of(prepared, pair.site))) for pair in fitted.pairs
        ):
            own = in_type_of(params, prepared.elem_type(site.tensor))
            rounded += [site.tensor] * (own.step.tobytes() != params.step.tobytes())
        if rounded:
            notes.append(f"scales rounded to the type of the tensors, {names_text(dict.fromkeys(rounded))}")
        inserted = insert_qdq(prepared, fitted.placement, fitted.numbers, floating=fitted.floating)
        return replace(inserted, notes=(*converted, *notes, *inserted.notes))


def _sum(backend: object, records: Iterable[object], factors: Sequence[object]) -> str:
    """Checksum of factors and of sites with their numbers, in any order. The digest covers the placement only."""
    return content_sum([backend, *sorted(map(content_sum, records)), *factors])


# ---- the file border ----------------------------------------------------------------------------


class _Consumer(BaseModel):
    node: str
    input: Annotated[int, Field(ge=0)]
    position: str | None = None  # of the node in the graph, for models where its name differs


class _Site(BaseModel):
    model_config = ConfigDict(strict=True)

    tensor: str
    consumers: Annotated[list[_Consumer], Field(min_length=1)]
    format: str
    scale: float | list[float]
    zero_point: int | list[int]
    axis: Annotated[int, Field(ge=0)] | None = None
    weight: bool | None = None  # by default, a site with an axis is a weight
    stored: bool = True  # of a weight: stored as integers behind a DQ, or float behind Q and DQ
    outer: float | None = None  # factor of all scales, if a format quantizes scales too
    rounding: str = ""  # of a weight: how its integers differ from the nearest ones
    bias: str = ""  # of a weight: the shift of the bias of its layer

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> _Site:
        pair = self.pair()
        try:
            fmt = number_format(self.format)
        except ConfigError as error:
            raise ValueError(error.what) from None
        if len(pair.scale) != len(pair.zero_point) or not pair.scale:
            raise ValueError("scale and zero_point must be equally many")
        if self.axis is None and len(pair.scale) != 1:
            raise ValueError("several scales need an axis")
        if (pair.outer is not None) != fmt.two_level:
            raise ValueError(f"an outer scale is {'missing' if fmt.two_level else f'nothing {fmt.name} has'}")
        scales = pair.scale if pair.outer is None else (*pair.scale, pair.outer)
        if not all(_SMALLEST <= scale <= _LARGEST for scale in scales):  # NaN fails too
            raise ValueError("a scale must be a positive float32")
        if not all(fmt.low <= z <= fmt.high for z in pair.zero_point):
            raise ValueError(f"a zero point of {fmt.name} lies between {fmt.low} and {fmt.high}")
        return self

    def pair(self) -> PlacedPair:
        site = Site(
            tensor=self.tensor,
            consumers=tuple(Consumer(end.node, end.input) for end in self.consumers),
            format=self.format,
            axis=self.axis,
            weight=self.axis is not None if self.weight is None else self.weight,
        )
        scale = tuple(self.scale) if isinstance(self.scale, list) else (self.scale,)
        zero_point = tuple(self.zero_point) if isinstance(self.zero_point, list) else (self.zero_point,)
        return record_of(PlacedPair, self, site=site, scale=scale, zero_point=zero_point)


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    schema_version: Literal[1]
    backend: str
    sites: list[_Site]
    equalized: list[dict[str, object]] = []  # factors of channels, see `Equalization`
    digest: str | None = None  # of the placement; after an edit by hand it must be deleted
    sum: str | None = None  # of everything including numbers; ignored without a digest
    dq_dtype: Literal["float32", "float16", "bfloat16"] | None = None  # of tensors without a type
    converted_from: Literal["float16"] | None = None  # the float type before the conversion to float32


def _check_content(content: object, where: Path) -> SchemeFile:
    try:
        file = _File.model_validate(content)
        factors = EQUALIZATIONS.validate_python(file.equalized)
    except ValidationError as error:
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        what = f"this is not a scheme: {problem_text(error, 'the whole file')}{more}"
        raise StateError(what, where=where, cure=_CURE) from None
    ends = (end for site in file.sites for end in site.consumers)
    known = SchemeFile(
        backend=file.backend,
        pairs=tuple(site.pair() for site in file.sites),
        equalized=factors,
        positions={end.node: end.position for end in ends if end.position is not None},
        dq_dtype=file.dq_dtype,
        converted_from=file.converted_from,
        path=where,
    )
    if file.digest is not None and file.digest != known.placement.digest:
        raise StateError(
            f"the scheme is damaged: its sites have digest {known.placement.digest}, it says {file.digest}",
            where=where,
            cure=_CURE,
        )
    assert isinstance(content, Mapping)  # it has been validated
    sites = [dict(site) for site in content["sites"]]
    if file.digest and file.sum is not None and file.sum != _sum(file.backend, sites, file.equalized):
        raise StateError(
            "the scheme is damaged: its numbers are not those that were written", where=where, cure=_CURE
        )
    return known
