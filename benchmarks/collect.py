"""The time of importing and collecting: ``python benchmarks/collect.py [SPECS]``.

Bars: ``import qdqspec`` at most 100 ms, ``pytest --collect-only`` on 1,000 specs at most 2 s. Times are CPU times, the
best of five new processes, which read compiled modules from a folder of this run; the times of Python or pytest
without qdqspec are printed as well.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

SPEC = """\
qdqspec: 1
model: models/m{number}.onnx
tags: [vision]
tune: {{trials: 12}}
checks:
  - {{kind: speedup, min: 1.1}}
  - {{kind: parity, min_sqnr_db: 25}}
"""


COMMENT = "# What the next line is for, and what else\n# could stand there.\n"
LONG = "".join(f"{COMMENT}{line}\n" for line in SPEC.splitlines())


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    compiled = tempfile.TemporaryDirectory()
    os.environ["PYTHONPYCACHEPREFIX"] = compiled.name
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    show("import qdqspec", ["-c", "import qdqspec"], ["-c", "pass"], bar=0.1)
    for kind, spec in (("small", SPEC), ("long", LONG)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number in range(count):
                (folder / f"s{number:05}.qdq.yaml").write_text(spec.format(number=number))
            collect = ["-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", name]
            collect.append(name)
            show(f"collect {count} {kind} specs", collect, [*collect, "-p", "no:qdqspec"], bar=2.0)


def show(title: str, words: list[str], without: list[str], bar: float) -> None:
    taken, base = best(words), best(without)
    print(
        f"{title}: {taken:.2f} s (without qdqspec {base:.2f} s), share {taken - base:.2f} s, bar {bar:.1f} s"
    )


def best(words: list[str]) -> float:
    def once() -> float:
        start = cpu_of_children()
        subprocess.run([sys.executable, *words], check=False, capture_output=True)
        return cpu_of_children() - start

    return min(once() for _ in range(5))


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
