"""The spec, commands and code of the how-to on parity run in order on the simulated device."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from qdqspec.app.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "parity.md"
QUIET = ("run_noise=0.005", "wall_noise=0.01", "build_noise=0.002")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.usefixtures("engine_threads")
def test_the_blocks_of_the_parity_page_run(
    pytester: pytest.Pytester,
    models: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tmp_path = pytester.path
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    shutil.copy(ROOT / "specs" / "data" / "digits_calibration.npz", tmp_path)
    (tmp_path / "digits.qdq.yaml").write_text(blocks("yaml")[0])
    options = ", ".join(f'"fake.{word}"' for word in QUIET)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.pytest]\nstrict = true\n[tool.qdqspec]\nbackend = "fake"\nbackend_option = [{options}]\n'
    )
    printed = []
    for line in "".join(blocks("sh")).splitlines():
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
    (tmp_path / "page.py").write_text("\n".join(blocks("python")))
    runpy.run_path("page.py")
