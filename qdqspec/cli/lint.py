"""Command ``lint``: report what a target rejects or runs slowly, before any build and without a device."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from qdqspec.cli.words import FINE, WANTING, Verbs, add_values, add_verb, answer, model_given
from qdqspec.collector import uncollected
from qdqspec.config.settings import DEFAULT_BACKEND


def add_verbs(verbs: Verbs) -> None:
    """Declare ``lint``."""
    parser = add_verb(
        verbs,
        "lint",
        lint,
        does="List what a target rejects or runs slowly, before any build. Exits 1 on what it rejects.",
        example=f"qdqspec lint model.qdq.onnx --target {DEFAULT_BACKEND}-cpu --strict",
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="T",
        help="A target for which a backend has rules; an unknown name lists all targets. Repeatable.",
    )
    parser.add_argument("--strict", action="store_true", help="Exit 1 also on findings of severity slow.")
    parser.add_argument(
        "--compute-capability",
        type=_capability,
        metavar="M.N",
        help="Compute capability of the GPU, such as 8.9; without it, findings that depend on it are notes.",
    )
    add_values(parser)
    parser.add_argument("--all", action="store_true", help="List all nodes of a rule, instead of five.")


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a compute capability such as 8.9")
    return int(major), int(minor)


@uncollected()
def lint(arguments: argparse.Namespace) -> int:
    """Check the model with the rules of each target."""
    from qdqspec.lint import lint_model
    from qdqspec.lint.rules import render_findings

    model = model_given(arguments.model, arguments.values)
    found = {
        target: lint_model(model, target, compute_capability=arguments.compute_capability)
        for target in dict.fromkeys(arguments.target)
    }
    most = 0 if arguments.all else 5
    text = "\n\n".join(render_findings(target, findings, most=most) for target, findings in found.items())
    answer(arguments, {"targets": {t: [asdict(f) for f in fs] for t, fs in found.items()}}, text)
    wanting = ("refused", "slow") if arguments.strict else ("refused",)
    return WANTING if any(f.severity in wanting for fs in found.values() for f in fs) else FINE
