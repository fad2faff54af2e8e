"""Docstrings, comments, names and user documents are written in the technical terms of the field."""

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
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

DOCUMENTS = (
    *sorted(path.name for path in ROOT.glob("*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
MOST_WORDS = 45  # of a sentence in a document

# Phrases that are never meant literally in a technical text, each with its replacement.
WORDS = {
    r"hear|hears|heard|hearings?|unheard|listens? to|listened": "measure, measured",
    r"heeds?|heeded|heeding": "apply the constraint",
    r"quietens?|quietened|too loud|noisy candidates?": "reduce the error, exceeds the error limit",
    r"whoever|nobody|no one|somebody": "the candidate that, no candidate, another tool",
    r"who (?:is|are|reads?|sees?|wins?|makes?|looks?|has|writes?|asks?) ": "the node that, the candidate that",
    r"(?:is|are|be|was|were) shipped|as shipped": "the selected model",
    r"left alone|leaves? alone|lets? alone": "unchanged, not quantized",
    r"tell(?:s|ing)? (?:\w+ )?apart|told apart|tells? \w+ from \w+": "distinguish, the difference of",
    r"stands? for|stands? in for": "represents, replaces",
    r"stand(?:s|ing)? (?:alone|around|still|beside|behind|there|where|in it|between|before|twice)": "is",
    r"(?:is|are|was|were) (?:told|said) (?:by|of|apart|otherwise)|as it is told": "is reported",
    r"floors? \d|this room|rooms|the house": "layer, package, code base",
    r"on (?:its|the|their) way(?! (?:back|from))": "during, between",
    r"how \w+ (?:fared|did)|what became of|what came of|comes? to in": "the result of",
    r"the nearest counts": "the most specific match applies",
    r"by (?:the )?way of": "through",
    r"go(?:es)? on (?:with|where|from|as)|gone on with|went on with": "continue",
    r"(?:is|are|was|were|be) blamed|to blame": "is the cause",
    r"last words": "the last lines of output",
    r"lies? (?:along|beyond|around|idle)": "is",
    r"says? (?:itself|so|nothing|little)|tells? (?:nothing|little)": "reports, states, shows",
    r"forgets?|forgotten|remembers?|remembered": "drop, keep, store",
    r"(?:is|are) (?:too )?dear": "is slow, costs much time",
    r"in vain": "without effect",
    r"as if it (?:never|had never)": "as without it",
}  # fmt: skip
PATTERN = re.compile("|".join(rf"(?P<w{i}>\b(?:{words})\b)" for i, words in enumerate(WORDS)), re.IGNORECASE)
# In docstrings and comments of tests. The package and the documents use some of these words in technical senses.
IN_TESTS = re.compile(
    r"\b(?:surviv\w+|dies|died|dying|dead|alive|lives|living|shipped|wants?|wanted|knows?|pays|told|tells?|said|says?|sees"
    r"|teach\w*|learnt|honest\w*|speaks?|spoken|happy|pretend\w*|promis\w+|mislead\w*|vanish\w*|gone|anew|quiet\w*"
    r"|whatever|asked (?:of|for|nothing)|gives? back|trips? over|tripped|at hand|in (?:its|their) way|side by side"
    r"|goes wrong)\b",
    re.IGNORECASE,
)
# In names of tests, where words are joined by underscores.
IN_NAMES = re.compile(
    r"_(?:(?:is|are|was|were|be|and)_(?:told|said)|told_apart|says?|tells?|nobody|whoever|somebody|heard|heeds?"
    r"|left_alone|stands_(?:for|before|behind|where)|blamed|surviv\w+?|dies|dead|alive|shipped|wants?|knows?|pays?"
    r"|sees?|honest\w*?|gone|forgets?|remembers?|promises?|whatever|behind|speaks?)(?=_|$)|^test_(?:who|what|it|they)_"
)
# In names of functions, classes, parameters and variables of the package.
FIGURES = re.compile(
    r"(?:^|_)(?:told|said|says|fate|bury|blamed?|mend|lonely|dead|die|dying|hunt|heard|gone|vain|hopeless|forget|remember"
    r"|nobody|whoever|speaks?|obey|salvage|alive|tidy|puzzle|tricks?|unsayable)(?:_|$)"
)
QUESTION = re.compile(r"(?:What|Who|Whom|Whose|Why|How|When|Where|Nobody|Whatever|Whoever)\b")
CODE = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments with their lines."""
    yield from docstrings(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Strings of more than one word that are no docstrings, with their lines: messages, help, keys of tables."""
    tree = ast.parse(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in skipped and " " in str(node.value):
            yield node.lineno, str(node.value)


def long_sentences(text: str) -> list[str]:
    """The sentences of a document with more than `MOST_WORDS` words; code blocks, tables and headings are skipped."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*[|#].*$", "", text, flags=re.MULTILINE)
    units = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text)
    sentences = (part for unit in units for part in re.split(r"(?<=[.!?:;])\s+", unit))
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


def found_words(text: str) -> list[tuple[str, str]]:
    """The words that do not belong into a text, each with what to write instead; code and quotations are skipped."""
    instead = list(WORDS.values())
    plain = re.sub(r"\s+", " ", CODE.sub("", text))
    return [(hit[0], instead[int(str(hit.lastgroup)[1:])]) for hit in PATTERN.finditer(plain)]


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_and_comments_use_technical_terms(path):
    hits = [
        f"{path}:{line}: '{word}': write {instead}"
        for line, text in prose(path.read_text(encoding="utf-8"))
        for word, instead in found_words(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_and_comments_of_tests_have_no_figures_of_speech(path):
    hits = [
        f"{path}:{line}: '{hit[0]}'"
        for line, text in prose(path.read_text(encoding="utf-8"))
        for hit in IN_TESTS.finditer(re.sub(r"\s+", " ", CODE.sub("", text)))
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_messages_use_technical_terms(path):
    hits = [
        f"{path}:{line}: '{word}': write {instead}"
        for line, text in messages(path.read_text(encoding="utf-8"))
        for word, instead in found_words(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_begin_with_a_noun_or_a_verb(path):
    hits = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if QUESTION.match(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_of_tests_use_technical_terms(path):
    names = (
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    )
    assert [name for name in names if IN_NAMES.search(name)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_names_of_the_package_use_technical_terms(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names |= {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower() for node in nodes if isinstance(node, defined)
    }
    assert [name for name in sorted(names) if FIGURES.search(name)] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sentences_of_documents_are_short(name):
    assert long_sentences((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_use_technical_terms(name):
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found_words(text) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_docstrings_do_not_repeat_the_layers(path):
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert not re.search(r"May import|[Ff]loors? \d|Standard library only", doc), "see docs/architecture.md"


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The engine survives, and the backend wants what the journal said.", ["survives", "wants", "said"]),
        ("A known device; unwanted, seen, surveyed and deadlocked are other words.", []),
    ],
)
def test_the_check_of_tests_finds_these_words_only(text, words):
    assert IN_TESTS.findall(text) == words


def test_messages_are_all_strings_of_several_words_but_docstrings():
    source = '''def f(x):
    """A docstring."""
    raise ValueError(f"the {x} stands", "one", "two " "three")
'''
    assert sorted(text for _, text in messages(source)) == ["the {} stands", "two three"]


def test_long_sentences_are_found_outside_code_and_tables():
    long = "word " * MOST_WORDS + "more."
    text = f"# {long}\n\nShort. {long}\n\n| {long} |\n\n```sh\n{long}\n```\n\n- {long}\n- Short: word.\n"
    assert [len(sentence.split()) for sentence in long_sentences(text)] == [MOST_WORDS + 1, MOST_WORDS + 2]
