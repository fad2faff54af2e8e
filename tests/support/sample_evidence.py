"""Sample evidence of responsible pairs, parity searches, lint and optimizers, in addition to `qdqspec.testing`."""

from __future__ import annotations

from dataclasses import replace

from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec.testing.records import sample_pairs, sample_parity
from qdqspec.types import (
    BuildEvidence,
    Consumer,
    Culprit,
    CulpritEvidence,
    Finding,
    LayerTime,
    LintTarget,
    Optimizer,
    ParitySearch,
    Probe,
    SurvivalEvidence,
    TriedInput,
)
from qdqspec.types.requests import BuildRequest


def sample_survival(pairs: int) -> dict[Optimizer, SurvivalEvidence]:
    """All results of optimizers: pairs kept, fused or lost, and an optimizer that is not installed."""
    lost = ("fire3/x > fire3/conv:0", "fire3/w > fire3/conv:1")
    found = (
        SurvivalEvidence(optimizer="constant-folding", kept=pairs),
        SurvivalEvidence(optimizer=f"{DEFAULT_BACKEND}-extended", kept=2, integer=pairs - 2),
        SurvivalEvidence(optimizer="onnxscript", kept=pairs - len(lost), lost=lost),
        SurvivalEvidence(
            optimizer="onnxslim", error="onnxslim is not installed here", cure="pip install onnxslim"
        ),
    )
    return {result.optimizer: result for result in found}


def sample_builds() -> dict[str, BuildEvidence]:
    """A build that the compiler refuses, and a build of the case's backend with a node on the CPU."""
    refused = "the compiler refuses the model for SM86 at node 'fire2/concat_1': fp8 is not supported"
    build = BuildEvidence(
        backend="tensorrt-rtx", target="SM86", refused=refused, cure="leave the node in float"
    )
    return {"tensorrt-rtx:SM86": build, BuildRequest().key: placed(("LayerNormalization", "cpu", False))}


def placed(*kernels: tuple[str, str, bool]) -> BuildEvidence:
    """A build whose kernels have an operator, a place, and whether they compute in integers."""
    layers = tuple(
        LayerTime(name=f"n{i}", op_type=op, milliseconds=0.0, nodes=(f"n{i}",), integer=integer, place=place)
        for i, (op, place, integer) in enumerate(kernels)
    )
    ops = {layer.name: layer.op_type for layer in layers}
    return BuildEvidence(backend="onnxruntime-qnn", layers=layers, ops=ops)


def sample_lint(refusing: LintTarget) -> dict[LintTarget, tuple[Finding, ...]]:
    """A target with a finding of severity ``refused``, and that of the default backend with a note only."""
    refused = Finding(
        id="TRT001",
        severity="refused",
        node="fire3/x_QuantizeLinear",
        message="has zero point 128",
        title="The zero point is not zero: this target quantizes symmetrically only",
        cure="quantize again with zero points of 0",
        source="the parser of the target",
    )
    slow = replace(refused, id="TRT042", severity="slow", node="", message="12 of 12 are float32")
    note = replace(refused, id="ORT013", severity="note", node="", message="12 may saturate")
    return {refusing: (refused, slow), f"{DEFAULT_BACKEND}-cpu": (note,)}


def sample_culprits() -> CulpritEvidence:
    """Three pairs that cause most of the error: an activation, a weight, and the pair of the graph output."""
    pairs = sample_pairs(6)
    made = replace(pairs[0].site, tensor="softmaxout_1", consumers=(Consumer("", 0),))
    costs = ((pairs[8].site, 33.6, 0.61, 35.2), (pairs[3].site, 38.4, 0.2, 37.9), (made, 41.4, 0.1, 41.5))
    return CulpritEvidence(
        output="softmaxout_1",
        pairs=tuple(
            Culprit(site=site, alone_db=alone, share=share, without_db=without)
            for site, alone, share, without in costs
        ),
        total=12,
        rest=0.09,
        together_db=31.4,
        samples=8,
        data="evaluation",
    )


def sample_parity_search(*, found: bool) -> ParitySearch:
    """A search that found nothing, or an input beyond the calibrated range."""
    if not found:
        return ParitySearch(tried=187, seconds=4.2, closest_db=22.6)
    image = TriedInput(
        name="data_0",
        dtype="float32",
        shape=(1, 3, 224, 224),
        words="302 and -246 in turn",
        low=-246.0,
        high=302.0,
        known_low=-123.0,
        known_high=151.0,
    )
    return ParitySearch(
        tried=64,
        seconds=2.1,
        closest_db=20.4,
        found=Probe(
            inputs=(image,),
            broken=("output 'softmaxout_1': SQNR 11.2 dB < 20.0 dB",),
            parity=replace(sample_parity(("softmaxout_1", 11.2)), samples=1, data="tried"),
            file="reports/squeezenet/default/parity/parity.npz",
            command="qdqspec verify squeezenet.onnx tuned.onnx --input reports/squeezenet/default/parity/parity.npz",
        ),
    )
