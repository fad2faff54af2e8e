"""A simulated device: seeded, without delays, with configurable noise and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.config.hooks import Declaration, attributes_of

if TYPE_CHECKING:
    from qdqspec.backends.fake.engine import FakeDevice as FakeDevice
    from qdqspec.backends.fake.engine import FakeEngine as FakeEngine
    from qdqspec.backends.fake.engine import options_from as options_from
    from qdqspec.backends.fake.engine import true_ms as true_ms

declaration = Declaration(targets=("fake",))

__getattr__ = attributes_of(
    f"{__name__}.engine", "backend", "FakeDevice", "FakeEngine", "options_from", "true_ms"
)
