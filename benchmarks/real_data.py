"""The models of folders with suitable data, for `benchmarks/real.py` and `benchmarks/claims.py`.

    NAME.onnx, NAME_calibration.npz, NAME_evaluation.npz; models.json contains the measure of agreement of each NAME

For a folder without such files, the data is that named in its MODELS.md: ``digits_eval.npz`` and ``minilm_eval.npz``;
for models that are also in ``specs/models``, it is in ``specs/data``. All other models have seeded random inputs, and
are marked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from independent import Feed, feeds_of, open_session

OURS = Path(__file__).parents[1] / "specs" / "data"
SPECS = {"squeezenet10": ("squeezenet", "same class"), "ultraface_rfb320": ("faces", "same detections")}
CALIBRATION, EVALUATION = 16, 1024  # largest number of samples
# Models of the folders with random weights, whose accuracy is not meaningful.
RANDOM_WEIGHTS = frozenset(
    {
        "bert_small_s128",
        "convnext_atto_b1",
        "mobilenetv2_b1",
        "qdq_conv_polygraphy",
        "synth_res_5k",
        "unet_b1",
    }
)
DYNAMIC = 64  # size of a dynamic dimension that is not the batch
FIXED = {"silero_vad_16k": {"sr": 16000}, "voice_activity": {"sr": 16000}}  # conditions of an If
TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float16)": np.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model file, its measure of agreement and data; ``calibration`` is ``None`` for a model without inputs."""

    name: str
    path: Path
    judged: str
    calibration: Path | None
    evaluation: Path | None
    is_random: bool = False

    @property
    def values(self) -> dict[str, int]:
        """Inputs to fix, by which the body of an If that is not executed is removed."""
        return FIXED.get(self.name, {})

    def feeds(self) -> list[Feed]:
        """The evaluation samples."""
        return [{}] if self.evaluation is None else feeds_of(self.evaluation, self.path, EVALUATION)

    def calibration_feeds(self) -> list[Feed]:
        """The calibration samples."""
        return [] if self.calibration is None else feeds_of(self.calibration, self.path, CALIBRATION)


def find_models(folders: Sequence[Path], names: Sequence[str], scratch: Path) -> Iterator[RealModel]:
    """The models of the folders, in the order of names; generated data is written to ``scratch``."""
    scratch.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        known = json.loads((folder / "models.json").read_text()) if (folder / "models.json").is_file() else {}
        for path in sorted(folder.glob("*.onnx")):
            if not names or path.stem in names:
                yield _with_data(
                    path.absolute(), known.get(path.stem, {}).get("judged", ""), folders, scratch
                )


def _with_data(path: Path, judged: str, folders: Sequence[Path], scratch: Path) -> RealModel:
    name, given = path.stem, path.parent / f"{path.stem}_calibration.npz"
    is_random = False
    if given.is_file():
        pair = given, path.with_name(f"{name}_evaluation.npz")
    elif name in SPECS:
        prefix, judged = SPECS[name]
        pair = OURS / f"{prefix}_calibration.npz", OURS / f"{prefix}_evaluation.npz"
    elif name.startswith("silero") and (theirs := _beside("voice_activity", folders)) is not None:
        pair, judged = theirs, "probability within 0.02"
    else:
        pair = scratch / f"{name}_calibration.npz", scratch / f"{name}_evaluation.npz"
        known = _known(path)
        is_random = known is None
        calibration, evaluation = _random(path) if known is None else known
        if not calibration:
            return RealModel(name=name, path=path, judged="", calibration=None, evaluation=None)
        judged = "" if is_random or "minilm" in name else "same class"
        np.savez(pair[0], **calibration)
        np.savez(pair[1], **evaluation)
    return RealModel(
        name=name,
        path=path,
        judged=judged,
        calibration=pair[0].absolute(),
        evaluation=pair[1].absolute(),
        is_random=is_random,
    )


def _beside(name: str, folders: Sequence[Path]) -> tuple[Path, Path] | None:
    for folder in folders:
        if (folder / f"{name}_calibration.npz").is_file():
            return folder / f"{name}_calibration.npz", folder / f"{name}_evaluation.npz"
    return None


def _known(path: Path) -> tuple[Feed, Feed] | None:
    """Data named in MODELS.md of the folder: handwritten digits for small images, texts for MiniLM."""
    if "minilm" in path.stem and (path.parent / "minilm_eval.npz").is_file():
        texts = _arrays(path.parent / "minilm_eval.npz")
        both = {
            "input_ids": np.concatenate([texts["query_ids"], texts["doc_ids"]]),
            "attention_mask": np.concatenate([texts["query_mask"], texts["doc_mask"]]),
        }
        known = {"input_ids": texts["calib_ids"], "attention_mask": texts["calib_mask"]}
        # Queries and documents alternate, so that the first samples contain both.
        turns = np.arange(len(both["input_ids"])).reshape(2, -1).T.reshape(-1)
        return known, {name: array[turns] for name, array in both.items()}
    inputs = open_session(path).get_inputs()
    size = inputs[0].shape[-2:] if len(inputs) == 1 else []
    if size not in ([16, 16], [28, 28]) or not (path.parent / "digits_eval.npz").is_file():
        return None
    digits = _arrays(path.parent / "digits_eval.npz")
    images = [digits["calib_x"][:CALIBRATION], digits["eval_x"][:EVALUATION]]
    if size == [28, 28]:  # bytes from 0 to 255 with the digit at the centre
        images = [255 * np.pad(array, [(0, 0), (0, 0), (6, 6), (6, 6)]) for array in images]
    calibration, evaluation = ({inputs[0].name: array.astype(np.float32)} for array in images)
    return calibration, evaluation


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:  # noqa: TID251 - closed here
        return {name: arrays[name] for name in arrays.files}


def _random(path: Path) -> tuple[Feed, Feed]:
    """Standard normal numbers; tokens below 1,000, other integers one; seeded by the name."""
    random = np.random.default_rng(zlib.crc32(path.stem.encode()))
    made: list[Feed] = []
    for count in (CALIBRATION, CALIBRATION):
        feed = {}
        for value in open_session(path).get_inputs():
            shape = [dim if isinstance(dim, int) and dim > 0 else DYNAMIC for dim in value.shape]
            shape = [count, *shape[1:]] if shape else [count]
            dtype = TYPES.get(value.type, np.float32)
            if np.issubdtype(dtype, np.floating):
                feed[value.name] = random.standard_normal(shape).astype(dtype)
            elif "id" in value.name:
                feed[value.name] = random.integers(0, 1000, shape).astype(dtype)
            else:
                feed[value.name] = np.ones(shape, dtype)
        made.append(feed)
    return made[0], made[1]
