"""Tunes, measures and checks cases: `pipeline` runs one case, `Session` holds the shared resources of cases."""

from qdqspec.app.session.session import Session, judge_case

__all__ = ["Session", "judge_case"]
