"""Objects that are closed at the end of a ``with`` statement."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """A base for classes with a method ``close``, which releases their resources: ``with`` calls it."""

    __slots__ = ()

    def close(self) -> None:
        """Release the resources of the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
