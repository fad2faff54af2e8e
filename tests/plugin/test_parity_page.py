"""The how-to on parity says what works: its spec, commands and code are run, in order, on the simulated device."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "parity.md"
QUIET = ("run_noise=0.005", "wall_noise=0.01", "build_noise=0.002")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page(tmp_path: Path, models: Path) -> None:
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    shutil.copy(ROOT / "specs" / "data" / "digits_calibration.npz", tmp_path)
    (tmp_path / "digits.qdq.yaml").write_text(blocks("yaml")[0])
    options = ", ".join(f'"fake.{word}"' for word in QUIET)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.pytest]\nstrict = true\n[tool.qdqspec]\nbackend = "fake"\nbackend_option = [{options}]\n'
    )
    said = []
    for line in "".join(blocks("sh")).splitlines():
        command, _, code = line.partition("# exits ")
        words = shlex.split(command)
        module = {"pytest": "pytest", "qdqspec": "qdqspec"}[words[0]]
        done = run(tmp_path, "-m", module, *words[1:])
        assert done.returncode == int(code[0]), f"{line}\n{done.stdout}{done.stderr}"
        said.append(done.stdout)
    parity, compared, culprits, robust, again = said
    assert "1 passed" in parity
    assert "quantization: float model > Q/DQ arithmetic" in compared
    assert "      exclude:\n" in culprits
    assert re.search(r"for an input found: output 'logits': SQNR \d+\.\d dB < 20\.0 dB", robust)
    assert again.split("\n")[0] in robust, "the very same numbers"
    (command,) = re.findall(r"^E?\s*(qdqspec verify .*)$", robust, re.MULTILINE)
    assert command.startswith(shlex.join(words)), "the page has the command that a failure ends with"
    (tmp_path / "page.py").write_text("\n".join(blocks("python")))
    done = run(tmp_path, "-W", "error", "page.py")
    assert done.returncode == 0, done.stderr


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
