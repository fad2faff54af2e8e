"""Docstrings, comments and user documents are written in the technical terms of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "qdqspec"

FINISHED = (
    "__init__", "__main__", "accuracy", "api", "backends", "baseline", "cases", "checks", "cli", "collector",
    "config", "corrections", "errors", "files", "graph", "lint", "measurement", "parity", "placement", "plain_json",
    "plugin", "preparation", "progress", "quantize", "regions", "registry", "rehearsal", "report", "search", "session",
    "spec", "temporary", "testing", "types", "units",
)  # fmt: skip
DOCUMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("architecture", "guide", "tensorrt")),
    *(
        path.relative_to(ROOT).as_posix()
        for folder in ("how-to", "decisions")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
)

# What is never meant literally in a technical text, and what to write instead.
WORDS = {
    r"hear|hears|heard|hearings?|unheard|listens?|listened": "measure, measured",
    r"heeds?|heeded|heeding": "apply the constraint",
    r"quietens?|quietened|too loud|noisy candidates?": "reduce the error, exceeds the error limit",
    r"whoever|nobody|no one|somebody": "the candidate that, no candidate, another tool",
    r"who (?:is|are|reads?|sees?|wins?|makes?|looks?|has|writes?|asks?) ": "the node that, the candidate that",
    r"(?:is|are|be|was|were) shipped|as shipped": "the selected model",
    r"left alone|leaves? alone|lets? alone": "unchanged, not quantized",
    r"tell(?:s|ing)? (?:\w+ )?apart|told apart|tells? \w+ from \w+": "distinguish, the difference of",
    r"stands? for|stands? in for|stand(?:s|ing)? (?:alone|around|still|beside|behind|there|where)": "is, represents",
    r"(?:is|are|was|were) (?:told|said) (?:by|of|apart|otherwise)|as it is told": "is reported",
    r"floors? \d|this room|rooms|the house": "layer, package, code base",
    r"on (?:its|the|their) way(?! (?:back|from))": "during, between",
    r"how \w+ (?:fared|did)|what became of|what came of|comes? to in": "the result of",
    r"the nearest counts": "the most specific match applies",
    r"by (?:the )?way of": "through",
}  # fmt: skip
PATTERN = re.compile("|".join(rf"(?P<w{i}>\b(?:{words})\b)" for i, words in enumerate(WORDS)), re.IGNORECASE)
CODE = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"")


def finished_files() -> list[Path]:
    found = (
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in FINISHED
    )
    return sorted(found)


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found_words(text: str) -> list[tuple[str, str]]:
    """The words that do not belong into a text, each with what to write instead; code and quotations are skipped."""
    instead = list(WORDS.values())
    plain = re.sub(r"\s+", " ", CODE.sub("", text))
    return [(hit[0], instead[int(str(hit.lastgroup)[1:])]) for hit in PATTERN.finditer(plain)]


@pytest.mark.parametrize("path", finished_files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_and_comments_use_technical_terms(path):
    hits = [
        f"{path}:{line}: '{word}': write {instead}"
        for line, text in prose(path.read_text(encoding="utf-8"))
        for word, instead in found_words(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_use_technical_terms(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found_words(text) == []


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_module_docstrings_do_not_repeat_the_layers(path):
    if path in finished_files():
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert not re.search(r"May import|[Ff]loors? \d|Standard library only", doc), (
            "see docs/architecture.md"
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hears every candidate and heeds the metric.", ["Hears", "heeds"]),
        ("Nobody reads what is left alone.", ["Nobody", "left alone"]),
        ("The graph of whoever is on its way, in words told apart.", ["whoever", "on its way", "told apart"]),
        ("May import floors 0 to 2; floor 1 only.", ["floors 0", "floor 1"]),
        ("Round to the floor; the rest room is left; `whoever` and ``hear`` are names.", []),
        ("The heart of a shape; share, heed_ and clear are other words.", []),
    ],
)
def test_the_check_finds_these_words_only(text, words):
    assert [word for word, _ in found_words(text)] == words
