"""Frozen records that packages exchange.

A case is the request, a placement is the set of Q/DQ pairs, a trial is one built candidate, evidence is the
result of all measurements of a case, a verdict is the result of a check on it.
"""

from __future__ import annotations

from qdqspec.types.case import *  # noqa: F403 - this package is the sum of its modules
from qdqspec.types.evidence import *  # noqa: F403
from qdqspec.types.measurement import *  # noqa: F403
from qdqspec.types.search import *  # noqa: F403
