"""The errors that a user can meet.

Each message states the event, the place, the reason and the remedy. The facts are kept as attributes, so that
callers need not parse text. This module imports nothing.
"""

from __future__ import annotations

from pathlib import Path


class QdqspecError(Exception):
    """An error of the input or the environment, with its remedy.

    ``what`` is one complete sentence; ``where`` the file concerned (with line, if known); ``cure`` the next
    step for the reader.
    """

    def __init__(self, what: str, *, where: Path | str | None = None, cure: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.cure = cure
        head = what if self.where is None else f"{self.where}: {what}"
        super().__init__(head if cure is None else f"{head}\n  {cure}")


class SpecError(QdqspecError):
    """A spec file is invalid; all its problems are listed together.

    ``problems`` holds line, column (both from 1) and message of each, by position; empty without a file.
    """

    problems: tuple[tuple[int, int, str], ...] = ()


class PatternError(SpecError):
    """A pattern expression is invalid. ``column``, counted from 1, is the position of the caret."""

    def __init__(self, what: str, *, text: str, column: int, cure: str | None = None) -> None:
        self.text = text
        self.column = column
        line = text.replace("\n", " ").replace("\t", " ")
        caret = f"{line}\n  {' ' * (column - 1)}^"
        super().__init__(f"{what}, in the pattern", cure=caret if cure is None else f"{caret}\n  {cure}")


class ConfigError(QdqspecError):
    """An option, environment variable or ``[tool.qdqspec]`` key is unknown or has a wrong value."""


class ModelError(QdqspecError):
    """An ONNX model cannot be read, is invalid, or lacks its external data."""


IN_MEMORY = ".in-memory"  # a folder of data given in memory: of a folder for each argument or loader


class DataError(QdqspecError):
    """Calibration or evaluation data is missing, of the wrong shape, or holds NaN.

    Of data given in memory, ``where`` is its argument or loader and the feed, not a temporary file.
    """

    def __init__(self, what: str, *, where: Path | str | None = None, cure: str | None = None) -> None:
        parts = Path(where or "").parts
        if IN_MEMORY in parts:
            name, *files = parts[parts.index(IN_MEMORY) + 1 :]
            numbers = [Path(file).stem for file in files]
            where = f"data '{name}'" + "".join(f", feed {int(n)}" for n in numbers if n.isdecimal())
            cure = cure and cure.replace(f"arrays: {parts[-1]}", f"loader: {name}")
        super().__init__(what, where=where, cure=cure)


class PlacementError(QdqspecError):
    """A placement does not fit the model it is applied to."""


class BackendError(QdqspecError):
    """A backend failed to build or run a model. Inside a search this becomes a failed trial."""


class BackendUnavailableError(BackendError):
    """The requested backend is not usable on this machine; the cure explains how to install it."""


class StateError(QdqspecError):
    """A journal, cache entry or record belongs to something else, or is damaged."""


class OutputError(QdqspecError):
    """An output file or folder cannot be written."""
