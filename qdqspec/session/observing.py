"""Runs a model with inner tensors as outputs, for calibration.

It runs on the backend itself if that returns outputs fast enough; else on the reference runtime, with the backend as
fallback for models that this cannot run, such as those with plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from qdqspec.backends.base import Array, Backend, BuildOptions, Engine
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.graph.save import save_model
from qdqspec.graph.wire import Parts
from qdqspec.measurement.isolate import Isolated
from qdqspec.quantize.calibrate import Feed
from qdqspec.session.runtimes import ARITHMETIC
from qdqspec.temporary import TemporaryFolder

_CURE = (
    "give the library of its operators with --qdq-plugin (--plugin on the command line), or a scale for each "
    "activation in a calibration cache: inputs.scales"
)


class Observing:
    """Runs observers of one model. ``alone`` is whether the backend itself runs them."""

    def __init__(
        self,
        given: Model,
        backend: Backend,
        options: BuildOptions,
        *,
        alone: bool,
        note: Callable[[str], None],
    ) -> None:
        self._given = given
        self._backend = backend
        self._options = options
        self._alone = alone
        self._note = note

    def runner(
        self, observers: ExitStack, observer: Parts, base: Path, cure: str | None = None
    ) -> Callable[[Feed], Mapping[str, Array]]:
        """A function that runs the observer until ``observers`` are closed; ``cure`` is the advice for a failed run.

        Raises `BackendError` if no backend can build it.
        """
        path = observers.enter_context(TemporaryFolder()) / "observer.onnx"
        save_model(observer, path, base=base)
        engine = observers.enter_context(closing(self._built(observers, path)))

        def run(feed: Feed) -> Mapping[str, Array]:
            with self._explained(path, cure):
                return engine.run(feed)

        return run

    def _built(self, observers: ExitStack, path: Path) -> Engine:
        if self._alone:
            with self._explained(path):
                return self._backend.build(path, self._options)
        other = observers.enter_context(Isolated(ARITHMETIC))
        try:
            with self._explained(path):
                return other.build(path, self._options)
        except BackendError as error:
            return self._after_all(path, error)

    def _after_all(self, path: Path, refusal: BackendError) -> Engine:
        """Build it on the backend, although each additional output costs memory and prevents fusion."""
        name = self._backend.name
        try:
            with self._explained(path):
                engine = self._backend.build(path, self._options)
        except BackendError as error:
            raise BackendError(
                f"no range can be found for its activations: {ARITHMETIC} cannot run it ({refusal.what}), nor can "
                f"{name} with activations for outputs ({error.what})",
                where=self._given.where,
                cure=_CURE,
            ) from None
        self._note(f"calibrated on {name} itself, since {ARITHMETIC} cannot run the model: {refusal.what}")
        return engine

    @contextmanager
    def _explained(self, observer: Path, cure: str | None = None) -> Iterator[None]:
        """Errors of the observer, reported for the model that it observes."""
        try:
            yield
        except BackendError as error:
            what = error.what.replace(str(observer), self._given.where)
            raise BackendError(what, where=self._given.where, cure=error.cure or cure) from None
