"""The documents: their specs load, their commands are accepted, their code runs, and generated pages are up to date."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sessions import few_digits

from qdqspec._core.registry import names
from qdqspec.app.cli import main, parsers
from qdqspec.app.report.record import record_to_json
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.spec.models import load_spec
from qdqspec.testing.records import sample_run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((DOCS).glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
    DOCS / "gallery" / "index.md",
    DOCS / "reference" / "files.md",
]
PARTS = {
    "qdqspec": "qdqspec: 1\n",
    "model": "model: net.onnx\n",
    "inputs": "inputs: {evaluation: data.npz}\n",
    "checks": "checks: [{kind: speedup, min: 1.1}]\n",
}
END = {"&&", "||", "|", ">", ">>", ";"}


def fenced(page: str, language: str, mark: str = "") -> list[str]:
    """The blocks of a how-to in a language, or those behind a comment."""
    text = (DOCS / "how-to" / page).read_text(encoding="utf-8")
    return re.findall(rf"{mark}```{language}\n(.*?)```", text, re.DOTALL)


def numbered(page: Path, texts: Iterable[str]) -> Iterator[object]:
    """Parameters with ids such as ``guide-2``."""
    return (pytest.param(text, id=f"{page.stem}-{number}") for number, text in enumerate(texts, start=1))


def blocks(language: str) -> Iterator[object]:
    """The blocks in a language. The workflow of ci.md has a separate test."""
    for page in PAGES:
        text = re.sub(
            r"<!-- workflow -->\n```yaml\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        yield from numbered(page, re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def commands() -> Iterator[object]:
    """The lines of blocks that run a command of the project."""
    for page in PAGES:
        code = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        lines = "".join(code).replace("\\\n", " ").splitlines()
        found = re.findall(r"^(?:\$ )?((?:qdqspec|pytest) .*)", "\n".join(lines), re.MULTILINE)
        yield from numbered(page, dict.fromkeys(found))


def quoted() -> Iterator[object]:
    """The commands quoted in sentences, which may lack arguments."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        yield from numbered(page, dict.fromkeys(re.findall(r"`(qdqspec [^`]+)`", text)))


@pytest.mark.parametrize("block", [*blocks("yaml")])
def test_a_spec_of_a_page_loads(block: str, tmp_path: Path) -> None:
    keys = yaml.safe_load(block).keys()
    text = "".join(part for key, part in PARTS.items() if key not in keys) + block
    (tmp_path / "net.qdq.yaml").write_text(text, encoding="utf-8")
    assert load_spec(tmp_path / "net.qdq.yaml").cases()


@pytest.mark.parametrize("line", [*commands()])
def test_a_command_of_a_page_is_accepted(line: str, pytester: pytest.Pytester) -> None:
    program, *words = shlex.split(line, comments=True)
    words = words[: next((index for index, word in enumerate(words) if word in END), len(words))]
    if program == "pytest":
        pytester.parseconfig(*words)
    else:
        parsers()[0].parse_args(words)


@pytest.mark.parametrize("line", [*quoted()])
def test_a_quoted_command_has_an_existing_verb_and_options(line: str) -> None:
    _, verb, *words = shlex.split(line)
    known = parsers()[1][verb]._option_string_actions
    assert [word for word in words if word.startswith("-") and word.partition("=")[0] not in known] == []


@pytest.mark.parametrize("block", [*blocks("python")])
def test_imports_of_a_python_block_exist(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "qdqspec":
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("block", [*blocks("json")])
def test_a_scheme_of_a_page_is_read(block: str, tmp_path: Path) -> None:
    (tmp_path / "scheme.json").write_text(block, encoding="utf-8")
    assert SchemeFile.read(tmp_path / "scheme.json").pairs


def test_a_package_with_the_check_of_the_page_is_registered_and_judged(pytester, models) -> None:
    """The entry point registers the check under its kind, and it is judged and described like built-in checks."""
    code, points = (fenced("check.md", language)[0] for language in ("python", "toml"))
    groups = tomllib.loads(points)["project"]["entry-points"]
    folder = pytester.mkdir("my_package-1.0.dist-info")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n{name} = {target}\n" for group, one in groups.items() for name, target in one.items()
        )
    )
    pytester.makepyfile(
        my_package=code,
        test_mine="""
        from my_package import check
        from qdqspec.testing.checks import CheckContract
        from qdqspec.testing.records import faster_case
        from dataclasses import replace

        FASTER = faster_case().evidence
        SHIFTED = replace(FASTER, figures={"mean-shift": {"largest": 0.2}})

        class TestMine(CheckContract):
            check = check
            passing = ({"kind": "mean-shift", "max": 1}, SHIFTED)
            failing = ({"kind": "mean-shift", "max": 0.1}, SHIFTED)
            inconclusive = ({"kind": "mean-shift", "max": 1}, FASTER)
        """,
    )
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    np.savez(pytester.path / "data.npz", input=np.ones((4, 1, 16, 16), np.float32), labels=np.arange(4))
    (pytester.path / "net.qdq.yaml").write_text(
        "qdqspec: 1\nmodel: digits_resnet.onnx\ninputs: {evaluation: data.npz}\ntune: {trials: 1}\n"
        "checks: [{kind: mean-shift, max: 100}, {kind: mean-shift, max: -1}]\n"
    )
    reports = ("r.json", "r.md", "r.html", "r.csv")
    options = ("--qdq-backend=fake", *(f"--qdq-report={name}" for name in reports))
    run = pytester.runpytest_subprocess("net.qdq.yaml", *options)
    run.assert_outcomes(passed=1, failed=1)
    assert all("mean-shift" in (pytester.path / name).read_text() for name in reports)
    (case,) = json.loads((pytester.path / "r.json").read_text())["cases"]
    assert case["figures"]["mean-shift"].keys() == {"largest"}
    contract = pytester.runpytest_subprocess("test_mine.py").parseoutcomes()
    assert contract["passed"] > 5
    assert "failed" not in contract
    run.stdout.fnmatch_lines(["*mean-shift.largest 0 *mean-shift-2 FAIL*"])
    listed = pytester.runpython_c("from qdqspec.app.cli import main; main(['list', 'checks'])")
    listed.stdout.fnmatch_lines(["mean-shift *how far the means of outputs may move*"])


def test_the_strategy_of_the_page_keeps_the_contract_of_strategies(pytester: pytest.Pytester) -> None:
    (code,) = fenced("strategy.md", "python")
    pytester.makepyfile(
        my_package=code,
        test_mine="""
        from my_package import FlipOne
        from qdqspec.testing.strategies import StrategyContract

        class TestFlipOne(StrategyContract):
            strategy = FlipOne
        """,
    )
    outcomes = pytester.runpytest_subprocess("test_mine.py").parseoutcomes()
    assert outcomes["passed"] > 5
    assert "failed" not in outcomes


def test_the_reference_pages_are_the_generated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "pydantic", minversion="2.14"
    )  # older versions omit docstrings of dataclasses in schemas
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name, text in importlib.import_module("reference").pages().items():
        assert (DOCS / "reference" / name).read_text(encoding="utf-8") == text, (
            "run: python tools/reference.py"
        )
    importlib.import_module("record_page").RUN.model_validate(record_to_json(sample_run()))


def test_the_commands_of_the_tutorial_are_accepted(pytester, models, monkeypatch) -> None:
    """The first command writes the spec; pytest accepts the options of the others and collects the checks."""
    commands = [shlex.split(one) for one in fenced("../tutorial.md", "sh", "<!-- command -->\n")]
    assert len(commands) == 6
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    (pytester.path / "data").mkdir()
    for name in ("digits_calibration.npz", "digits_evaluation.npz"):
        shutil.copy(models.parent / "data" / name, pytester.path / "data")
    monkeypatch.chdir(pytester.path)
    monkeypatch.setenv("QDQSPEC_BACKEND", "fake")
    assert main(commands[0][1:]) == 0
    assert "kind: accuracy" in (pytester.path / "specs" / "digits.qdq.yaml").read_text()
    for words in (words for program, *words in commands if program == "pytest"):
        run = pytester.runpytest_subprocess(*words, "--collect-only", "-q")
        assert run.ret == 0, words
        run.stdout.fnmatch_lines(["specs/digits.qdq.yaml::default::speedup"])


def test_each_gallery_spec_has_a_model_and_a_line_in_the_page() -> None:
    gallery = DOCS / "gallery"
    spec = importlib.util.spec_from_file_location("gallery_fetch", gallery / "fetch.py")
    fetching = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetching)
    page, paths = (gallery / "index.md").read_text(encoding="utf-8"), sorted(gallery.glob("*.qdq.yaml"))
    assert {path.name.partition(".")[0] for path in paths} == set(fetching.MODELS)
    for path in paths:
        name, loaded = path.name.partition(".")[0], load_spec(path, root=gallery)
        assert Path(str(loaded.model)).name == f"{name}.onnx"
        assert loaded.checks
        assert path.name in page
        assert fetching.MODELS[name].package.partition("==")[0] in page


# ---- parity.md -----------------------------------------------------------------------------------

QUIET = ("run_noise=0.005", "wall_noise=0.01", "build_noise=0.002")


@pytest.mark.usefixtures("engine_threads")
def test_the_blocks_of_the_parity_page_run(pytester, models, capsys) -> None:
    tmp_path = pytester.path
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    shutil.copy(ROOT / "specs" / "data" / "digits_calibration.npz", tmp_path)
    (tmp_path / "digits.qdq.yaml").write_text(fenced("parity.md", "yaml")[0])
    options = ", ".join(f'"fake.{word}"' for word in QUIET)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.pytest]\nstrict = true\n[tool.qdqspec]\nbackend = "fake"\nbackend_option = [{options}]\n'
    )
    printed = []
    for line in "".join(fenced("parity.md", "sh")).splitlines():
        command, _, code = line.partition("# exits ")
        words = shlex.split(command)
        capsys.readouterr()
        run = {"pytest": pytester.runpytest_inprocess, "qdqspec": lambda *words: main(list(words))}[words[0]]
        done = run(*words[1:])
        assert (done if isinstance(done, int) else done.ret) == int(code[0]), line
        printed.append(capsys.readouterr().out)
    parity, of_case, compared, culprits, robust, again = printed
    assert "1 passed" in parity
    assert of_case.startswith("no limit is broken\n")
    assert "quantization: float model > Q/DQ arithmetic" in compared
    assert "      exclude:\n" in culprits
    assert re.search(r"for an input found: output 'logits': SQNR \d+\.\d dB < 20\.0 dB", robust)
    assert again.split("\n")[0] in robust, "the same numbers"
    (command,) = re.findall(r"^E?\s*(qdqspec verify .*)$", robust, re.MULTILINE)
    assert command.startswith(shlex.join(words)), "the page has the command of the failure text"
    (tmp_path / "page.py").write_text("\n".join(fenced("parity.md", "python")))
    runpy.run_path("page.py")


# ---- ci.md ---------------------------------------------------------------------------------------

CI_SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 1}
checks: [{kind: speedup, min: 1.01}, {kind: speedup, min: 40}]
"""


def workflow():
    (text,) = fenced("ci.md", "yaml", "<!-- workflow -->\n")
    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("words", "spec", "code"),
    [
        ("--qdq-mode=plan", CI_SPEC, 0),
        ("", CI_SPEC, 1),
        ("", CI_SPEC.replace("checks", "cheks"), 2),
        ("--qdq-mode=mesure", CI_SPEC, 4),
        ("-k nothing", CI_SPEC, 5),
        ("-m 'not tune'", CI_SPEC, 5),
    ],
)
def test_the_exit_codes_of_the_page(simulated, words, spec, code):
    (simulated.path / "specs" / "net.qdq.yaml").write_text(spec)
    assert simulated.runpytest_inprocess("specs", *shlex.split(words)).ret == code


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_the_commands_of_the_workflow_run(simulated, monkeypatch, tmp_path, workers):
    (simulated.path / "specs" / "net.qdq.yaml").write_text(CI_SPEC)
    for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    install, key, gate = (step["run"] for step in workflow()["jobs"]["gate"]["steps"] if "run" in step)
    assert install == "pip install qdqspec"  # the package is installed already
    subprocess.run(key, shell=True, check=True, timeout=120, cwd=simulated.path)
    assert re.fullmatch(r"key=[0-9a-f]{16}\n", (tmp_path / "GITHUB_OUTPUT").read_text())
    _, *words = shlex.split(gate)
    run = simulated.runpytest_subprocess(*words, *workers)
    run.assert_outcomes(passed=1, failed=1)
    run.stdout.fnmatch_lines(
        ["::error file=specs/net.qdq.yaml,line=4,title=net%3A%3Adefault%3A%3Aspeedup-2::*"]
    )
    assert "# Quantized models" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert (simulated.path / "run.json").is_file()


# ---- data.md -------------------------------------------------------------------------------------

DATA_SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
inputs: {{calibration: {calibration}, evaluation: {evaluation}}}
tune: {{trials: 1}}
checks:
  - {{kind: parity, min_sqnr_db: 1}}
  - {{kind: accuracy, metric: top1, min: 0}}
"""


def test_the_loader_and_the_images_of_the_page_are_read(pytester, models):
    shutil.copy(models / "digits_resnet.onnx", pytester.path)
    (loader,) = (block for block in fenced("data.md", "python") if "qdq_data" in block)
    pytester.makeconftest(loader)
    (pytester.path / "photos").mkdir()
    for number in range(3):
        Image.fromarray(np.full((20, 20), 60 * number, np.uint8)).save(pytester.path / f"photos/{number}.png")
    (pytester.path / "labels.txt").write_text("1\n2\n3\n")
    images = "{images: 'photos/*.png', size: 16, colors: gray, labels: labels.txt}"
    texts = {"loader": "{loader: my_batches}", "images": images, "wrong": "{loader: my_batch}"}
    for name, text in texts.items():
        spec = DATA_SPEC.format(calibration=text, evaluation=text)
        (pytester.path / f"{name}.qdq.yaml").write_text(spec)
    run = pytester.runpytest_subprocess("loader.qdq.yaml", "images.qdq.yaml", "--qdq-backend=fake")
    run.assert_outcomes(passed=4)
    run = pytester.runpytest_subprocess("wrong.qdq.yaml", "--qdq-backend=fake")
    run.assert_outcomes(failed=2)
    run.stdout.fnmatch_lines(["*no data loader is called 'my_batch'*"])


# ---- the table of checks in guide.md ----------------------------------------------------------------

EXAMPLES = re.findall(
    r"^\| `(\{kind: .*\})` \|", (DOCS / "guide.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_guide_is_a_valid_check(example: str, tmp_path: Path) -> None:
    head = "".join(text for key, text in PARTS.items() if key != "checks")
    (tmp_path / "a.qdq.yaml").write_text(f"{head}checks:\n  - {example}\n", encoding="utf-8")
    (case,) = load_spec(tmp_path / "a.qdq.yaml").cases()
    assert len(case.checks) == 1


def test_the_guide_has_an_example_of_every_kind_of_check() -> None:
    assert {re.match(r"\{kind: (\w+)", example)[1] for example in EXAMPLES} == set(names("check"))


# ---- python.md and accuracy.md ----------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the classifier and its data."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    for kind in ("calibration", "evaluation"):
        shutil.copy(ROOT / "specs" / "data" / f"digits_{kind}.npz", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("engine_threads")
def test_the_blocks_of_the_page_on_python_run(digits, models, monkeypatch, capsys) -> None:
    few_digits(models, digits, 16).rename("digits_calibration.npz")  # each call repeats the calibration
    Path("page.py").write_text("\n".join(fenced("python.md", "python")), encoding="utf-8")
    monkeypatch.setenv("QDQSPEC_BACKEND", "fake")
    runpy.run_path("page.py")
    assert "regions by structure" in capsys.readouterr().out
    written = {path.name for path in (digits / "tuned").iterdir()}
    assert {"reference.onnx", "tuned.onnx", "tuned_raw.onnx", "scheme.json", "trials.jsonl"} <= written
    assert {path.name for path in digits.iterdir()} >= {"best.onnx", "report.html", "run.json", "study"}


@pytest.mark.usefixtures("engine_threads")
def test_the_python_of_the_page_on_accuracy_runs(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("page.py").write_text("\n".join(fenced("accuracy.md", "python")), encoding="utf-8")
    runpy.run_path("page.py")
    reference, least, shipped, *_ = capsys.readouterr().out.split()
    assert float(least) == pytest.approx(float(reference) - 0.05)
    assert float(shipped) >= float(least)


@pytest.mark.usefixtures("engine_threads")
def test_the_search_of_the_page_on_accuracy_meets_its_constraint(digits, pytester, monkeypatch) -> None:
    (held,) = (block for block in fenced("accuracy.md", "yaml") if "tune:" in block)
    (digits / "a.qdq.yaml").write_text(held, encoding="utf-8")
    (digits / "conftest.py").write_text(fenced("accuracy.md", "python")[0], encoding="utf-8")
    monkeypatch.chdir(digits)
    words = ("-q", "a.qdq.yaml", "--qdq-json=run.json", "-p", "no:cacheprovider")
    assert pytester.runpytest_inprocess(*words).ret == 0
    found = json.loads((digits / "run.json").read_text(encoding="utf-8"))["cases"][0]
    bound = found["search"]["accuracy"]
    assert bound["reference"] == pytest.approx(534 / 540)
    assert found["accuracy"]["top1"]["tuned"] == pytest.approx(bound["selected"])
    assert bound["selected"] >= bound["least"]
