"""Generates the example data of this folder: ``python make_data.py``, with scikit-image, scikit-learn and Pillow.

All images are part of these packages; nothing is downloaded. See README.md for sources and licences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from skimage import data
from sklearn.datasets import load_digits, load_sample_images
from sklearn.model_selection import train_test_split

Size = tuple[int, int]  # height, width, in pixels
Window = tuple[float, float, float]  # vertical centre, horizontal centre, height, as shares of the image

HERE = Path(__file__).parent
CLASSIFIER_SIZE = (224, 224)
FACE_SIZE = (240, 320)
CAFFE_MEAN = np.array([104, 117, 123], np.float32)  # blue, green, red

# The evaluation windows differ from the calibration windows, but are from the same images.
WINDOWS: dict[str, list[Window]] = {
    "calibration": [(0.50, 0.50, 1.00), (0.45, 0.40, 0.70)],
    "evaluation": [(0.55, 0.55, 0.85)],
}
# Windows of the portrait that contain the face, which is near the top, left of the centre.
PORTRAITS: dict[str, list[Window]] = {
    "calibration": [
        (0.50, 0.50, 0.75), (0.35, 0.45, 0.60), (0.30, 0.42, 0.45), (0.28, 0.50, 0.40), (0.22, 0.45, 0.32),
    ],
    "evaluation": [(0.45, 0.55, 0.70), (0.32, 0.40, 0.50), (0.25, 0.45, 0.36)],
}  # fmt: skip


def main() -> None:
    """Write all files to the folder of this file."""
    write_digits()
    scenes = {"chelsea": data.chelsea(), "coffee": data.coffee(), "rocket": data.rocket()}
    scenes["china"], scenes["flower"] = load_sample_images().images
    portrait = data.astronaut()
    for use, windows in WINDOWS.items():
        views = [*crops([*scenes.values(), portrait], windows, CLASSIFIER_SIZE)]
        write(f"squeezenet_{use}", data_0=np.stack([for_squeezenet(view) for view in views]))
        views = [*crops([portrait], PORTRAITS[use], FACE_SIZE)]
        views += crops(scenes.values(), windows[-1:], FACE_SIZE)
        write(f"faces_{use}", input=np.stack([for_face_detector(view) for view in views]))


def write_digits() -> None:
    """80 digits of the training part, and the 540 that training did not use, scaled to 16x16 pixels."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32).repeat(2, axis=1).repeat(2, axis=2)[:, None]
    known, unseen = train_test_split(
        np.arange(len(images)), test_size=540, random_state=7, stratify=digits.target
    )
    write("digits_calibration", input=images[known[:80]])
    write("digits_evaluation", input=images[unseen], labels=digits.target[unseen].astype(np.int64))


def crops(pictures: Iterable[np.ndarray], windows: list[Window], size: Size) -> Iterator[np.ndarray]:
    """Every window of every image, scaled to ``size``; every second one is mirrored."""
    for number, (picture, window) in enumerate((p, w) for p in pictures for w in windows):
        view = crop(picture, window, size)
        yield view[:, ::-1] if number % 2 else view


def crop(picture: np.ndarray, window: Window, size: Size) -> np.ndarray:
    """The window with the aspect ratio of ``size``, moved into the image if it exceeds the border."""
    height, width = picture.shape[:2]
    tall = min(window[2] * height, width * size[0] / size[1])
    wide = tall * size[1] / size[0]
    top = np.clip(window[0] * height - tall / 2, 0, height - tall)
    left = np.clip(window[1] * width - wide / 2, 0, width - wide)
    box = (left, top, left + wide, top + tall)
    scaled = Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
    return np.asarray(scaled)


def for_squeezenet(view: np.ndarray) -> np.ndarray:
    """Blue, green, red, 0 to 255, without the mean, channels first: as the network was trained in Caffe."""
    return (view[..., ::-1].astype(np.float32) - CAFFE_MEAN).transpose(2, 0, 1)


def for_face_detector(view: np.ndarray) -> np.ndarray:
    """Red, green, blue, from -1 to 1, channels first."""
    return ((view.astype(np.float32) - 127) / 128).transpose(2, 0, 1)


def write(name: str, **arrays: np.ndarray) -> None:
    """Save as the .npz file of a spec."""
    np.savez_compressed(HERE / f"{name}.npz", **{key: np.ascontiguousarray(a) for key, a in arrays.items()})


if __name__ == "__main__":
    main()
