"""Lines of text about a comparison of outputs, for notes of a case and for tables. Loads no numpy, as checks do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qdqspec._core.units import db_text, plain
from qdqspec.types import TensorParity, WorstSlice

NAME_WIDTH = 30
NO_NUMBER = "equal: NaN or infinite in every sample"  # notes of such outputs
NO_SIGNAL = "equal: zero in every sample"


def slice_text(worst: WorstSlice) -> str:
    """A slice in words."""
    return f"slice {worst.index} of axis {worst.axis}"


def number_notes(outputs: Iterable[TensorParity]) -> Iterator[str]:
    """A line for each output that has no number to compare, or only zeros."""
    for out in outputs:
        if out.note in (NO_NUMBER, NO_SIGNAL):
            yield (
                f"output '{plain(out.name, NAME_WIDTH)}' is {out.note.removeprefix('equal: ')}, of the given model "
                "too: that it is equal proves nothing about other data"
            )


def slice_notes(outputs: Iterable[TensorParity]) -> Iterator[str]:
    """A line for each output with a slice far below the whole, with the cure."""
    for out in outputs:
        if (found := out.far_slice()) is not None:
            yield (
                f"output '{plain(out.name, NAME_WIDTH)}' has {db_text(out.sqnr_db)} dB over all, but "
                f"{slice_text(found)} has {db_text(found.sqnr_db)} dB, as where large and small values share a scale: "
                "keep the nodes that join them in float (patterns.nodes.exclude, quantize.outputs), and limit "
                "min_slice_sqnr_db of check parity"
            )
