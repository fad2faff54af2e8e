"""The process of one part: ``python -m qdqspec.backends.tensorrt.gpu_day PART FOLDER OPTIONS``, options as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from qdqspec.backends.tensorrt.gpu_day.archive import run_part

if __name__ == "__main__":
    run_part(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
