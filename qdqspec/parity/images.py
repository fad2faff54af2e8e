"""Images as samples: decoded one at a time with Pillow, resized and normalized as a spec states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array
from qdqspec.errors import DataError
from qdqspec.types import ImageRules

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jfif",
        ".png",
        ".bmp",
        ".gif",
        ".webp",
        ".avif",
        ".jp2",
        ".ppm",
        ".pgm",
        ".tif",
        ".tiff",
    }
)
_MOST_BROKEN = 10  # images that one message names
_MODES = {"rgb": "RGB", "bgr": "RGB", "gray": "L"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMember:
    """One image as an array of one sample, under the name of the input it is for."""

    file: Path
    name: str
    rules: ImageRules

    @property
    def shape(self) -> tuple[int, ...]:
        """One sample, and the shape of an image after the transform."""
        channels = 1 if self.rules.colors == "gray" else 3
        height, width = self.rules.size
        return (1, channels, height, width) if self.rules.layout == "nchw" else (1, height, width, channels)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """float32; uint8 if the pixels are not changed."""
        return np.dtype(np.uint8 if _is_plain(self.rules) else np.float32)

    def rows(self) -> Iterator[Array]:
        """The one sample."""
        yield transformed(_pixels(self.file, self.rules), self.rules)

    @property
    def is_readable(self) -> bool:
        """Whether the image can be decoded."""
        try:
            _pixels(self.file, self.rules)
        except DataError:
            return False
        return True


def unreadable(members: Sequence[ImageMember]) -> DataError | None:
    """The error that names all images which cannot be decoded, if there are several; `_MOST_BROKEN` at most."""
    if find_spec("PIL") is None:  # then none can, whatever it holds
        return None
    broken = list(islice((member.file for member in members if not member.is_readable), _MOST_BROKEN))
    if len(broken) < 2:
        return None
    most = "at least " if len(broken) == _MOST_BROKEN else ""
    names = "".join(f"\n    {file.name}" for file in broken[1:])
    return DataError(
        f"{most}{len(broken)} images cannot be read: this one and{names}",
        where=broken[0],
        cure="take them out",
    )


def transformed(pixels: npt.NDArray[np.uint8], rules: ImageRules) -> Array:
    """Pixels in height, width, channels (RGB or gray) as a sample."""
    if rules.colors == "bgr":
        pixels = pixels[..., ::-1]
    sample: Array = pixels
    if not _is_plain(rules):
        mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
        sample = (pixels.astype(np.float32) * np.float32(rules.scale) - mean) / std
    return np.ascontiguousarray(sample if rules.layout == "nhwc" else np.moveaxis(sample, -1, 0))


def _is_plain(rules: ImageRules) -> bool:
    return rules.scale == 1 and set(rules.mean) == {0.0} and set(rules.std) == {1.0}


def _pixels(file: Path, rules: ImageRules) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError(
            "images are decoded with Pillow, which is not installed",
            where=file,
            cure="pip install 'qdqspec[images]'",
        ) from None
    try:
        with Image.open(file) as opened:
            # An EXIF orientation is the intended one, which every viewer applies.
            image = _in_bytes(ImageOps.exif_transpose(opened)).convert(_MODES[rules.colors])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"the image cannot be read ({error})", where=file, cure="take it out") from None
    pixels = np.asarray(_fitted(image, rules), dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _in_bytes(image: Image) -> Image:
    """The image with 8 bits a channel. Pillow's own conversion of 16 bits clips them at 255."""
    from PIL import Image as Pillow

    if image.mode.startswith("I;16"):
        return Pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels of mode {image.mode} have no known range")
    return image


def _fitted(image: Image, rules: ImageRules) -> Image:
    """Scaled so that it covers ``size``, or to ``resize``, and cut from the centre."""
    from PIL import Image as Pillow

    height, width = rules.size
    if rules.resize is None:
        factor = max(width / image.width, height / image.height)
    else:
        factor = rules.resize / min(image.width, image.height)
    scaled = max(round(image.width * factor), width), max(round(image.height * factor), height)
    image = image.resize(scaled, Pillow.Resampling.BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
