"""Tunes, measures and checks cases: `pipeline` runs one case, `Session` holds what cases share."""

from qdqspec.session.session import Session

__all__ = ["Session"]
