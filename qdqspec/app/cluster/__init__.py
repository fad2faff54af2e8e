"""Runs cases on several machines: a scheduler, workers that announce their devices, and a session that uses them.

Dask distributed schedules. A case is one task: the client sends the files of the case to a worker, and the task returns
the results. The case itself runs in a child process of the worker. See docs/how-to/cluster.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qdqspec._core.config import Settings
from qdqspec.types import Case

if TYPE_CHECKING:
    from qdqspec.app.session import Session


def open_session(settings: Settings, expected: Iterable[Case], **more: Any) -> Session:
    """A session on this machine, or on the cluster of the settings, which may start ``expected`` cases ahead of time.

    ``more`` are arguments of a `Session` on this machine.
    """
    if settings.cluster is not None and settings.mode != "plan":
        from qdqspec.app.cluster.client import ClusterSession

        return ClusterSession(settings, expected=expected)
    from qdqspec.app.session import Session

    return Session(settings, **more)
