"""The check `builds`: whether a backend builds the tuned model for each of several targets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from qdqspec._core.units import count_text, plain, share_text
from qdqspec.checks.base import CheckParams, unmeasured, verdict
from qdqspec.spec import BackendName, Fraction, short_form
from qdqspec.types import BuildEvidence, Evidence, EvidenceKind, Section, Verdict
from qdqspec.types.requests import BuildRequest

_ADVICE = (
    "Allow more operators or a lower SQNR, or lower min_8bit. `qdqspec explain` names the kernels in float."
)
_SHOWN = 600  # characters of the backend's reason

Names = Annotated[tuple[str, ...], short_form(str, lambda name: [name], str | list[str])]


class BuildsCheck(CheckParams):
    """The backend that builds the tuned model, for which targets, and the share of heavy kernels in 8 bits."""

    needs: ClassVar[frozenset[EvidenceKind]] = frozenset({"builds"})
    kind: Literal["builds"]
    backend: BackendName = Field(description="The backend that builds the tuned model.")
    for_: Names = Field(
        (),
        alias="for",
        description="Values of the backend's option `for`, one build each, such as SM86 (default: one build with its "
        "own).",
    )
    min_8bit: Annotated[Fraction, Field(ge=0, le=1)] | None = Field(
        None,
        description="Smallest share of the kernels of convolutions, matrix products and attention that compute in 8 "
        "bits or fewer: 0.8 or 80%.",
    )

    def requests(self) -> tuple[BuildRequest, ...]:
        """One build for each target."""
        return tuple(BuildRequest(backend=self.backend, target=name) for name in self.for_ or ("",))

    def judge(self, evidence: Evidence) -> Verdict:
        """Pass if each build succeeds with enough kernels in 8 bits; inconclusive if the backend is not usable."""
        found = [evidence.builds.get(request.key) for request in self.requests()]
        builds = [build for build in found if build is not None]
        if len(builds) < len(found):
            return unmeasured("the tuned model was not built", "Run the case again, so that it is built.")
        if missing := [build for build in builds if build.missing]:
            what, cure = (
                f"backend {self.backend} is not usable here: {plain(missing[0].missing)}",
                missing[0].cure,
            )
            return verdict("inconclusive", what, advice=cure, command=cure if cure.startswith("pip ") else "")
        wrong = [build for build in builds if _problem_text(self, build)]
        decisive = min(wrong or builds, key=lambda build: (not build.refused, build.share or 0.0))
        counted = [build for build in builds if build.share is not None]
        least = min(counted, key=lambda build: build.share or 0.0, default=None)
        targets = ", ".join(build.target for build in builds if build.target)
        narrow = f", {least.narrow} of {least.heavy} heavy kernels in 8 bits" if least else ""
        built = f"builds{f' for {targets}' if targets else f' with {self.backend}'}{narrow}; nothing ran"
        rows = tuple(
            (
                build.target or "-",
                "refused" if build.refused else "built",
                "" if build.refused else str(build.kernels),
                "" if build.share is None else f"{build.narrow} of {build.heavy}",
            )
            for build in builds
        )
        return verdict(
            "fail" if wrong else "pass",
            _problem_text(self, decisive) or built,
            Section(
                title=f"Builds ({count_text(len(builds), 'build')})",
                headers=("for", "result", "kernels", "in 8 bits"),
                rows=rows,
            ),
            *(
                Section(title=f"Refusal for {one.target or one.backend}", text=plain(one.refused, _SHOWN))
                for one in builds
            ),
            numbers={f"8bit.{build.target}": build.share for build in counted if build.share is not None},
            advice=decisive.cure or _ADVICE,
        )


def _problem_text(params: BuildsCheck, build: BuildEvidence) -> str:
    """The reason why a build breaks the check; empty if it does not."""
    at = f" for {build.target}" if build.target else ""
    if build.refused:
        return f"refused{at}: {plain(build.refused, _SHOWN)}"
    if params.min_8bit is None:
        return ""
    if build.share is None:
        return f"{params.backend} lists no kernels of heavy operators{at}: min_8bit cannot be judged"
    if build.share >= params.min_8bit:
        return ""
    least = share_text(params.min_8bit)
    return f"only {build.narrow} of {build.heavy} heavy kernels compute in 8 bits{at}; asked {least}"


check = BuildsCheck
