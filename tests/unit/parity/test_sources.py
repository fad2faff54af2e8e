"""Data as .npy files, globs, images with a transform, arrays of other names, and labels in a separate file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qdqspec.accuracy.data import open_data
from qdqspec.accuracy.shapes import InputSpec
from qdqspec.app.preparation.stored import data_digest
from qdqspec.errors import DataError
from qdqspec.types import Data, ImageRules

FLOAT = np.dtype(np.float32)
X = {"x": InputSpec(dtype=FLOAT, shape=(1, 2, 3))}
TWO = {**X, "mask": InputSpec(dtype=np.dtype(np.int64), shape=(1, 4))}
PICTURE = {"image": InputSpec(dtype=FLOAT, shape=(1, 3, 4, 6))}


def rows(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first * 6, (first + count) * 6, dtype=np.float32).reshape(count, 2, 3)


def values(source: Path | Data, inputs: dict[str, InputSpec] = X, name: str = "x") -> np.ndarray:
    return np.concatenate([feed[name] for feed in open_data(source, inputs)])


def pictures(path: Path, **rules: object) -> np.ndarray:
    """The samples of images, scaled to 4 x 6."""
    return values(Data(path=path, images=ImageRules(size=(4, 6), **rules)), PICTURE, "image")


@pytest.mark.parametrize(
    "saved", [rows(4), rows(4)[:, None], rows(1)[0]], ids=["samples", "whole inputs", "one sample"]
)
def test_an_npy_file_contains_the_samples_of_the_only_input(tmp_path: Path, saved: np.ndarray) -> None:
    np.save(tmp_path / "any.npy", saved)
    np.testing.assert_array_equal(values(tmp_path / "any.npy"), saved.reshape(-1, 2, 3))


def test_npy_files_are_samples_in_order_of_name_or_inputs_by_name(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        np.save(tmp_path / f"sample-{number}.npy", rows(1, first=number)[0])
    np.save(tmp_path / "labels.npy", np.array([7, 8, 9]))
    np.testing.assert_array_equal(values(tmp_path), rows(3))
    np.testing.assert_array_equal(open_data(tmp_path, X).require_labels(), [7, 8, 9])
    (tmp_path / "two").mkdir()
    np.save(tmp_path / "two" / "x.npy", rows(2))
    np.save(tmp_path / "two" / "mask.npy", np.ones((2, 4), np.int64))
    assert [sorted(feed) for feed in open_data(tmp_path / "two", TWO)] == [["mask", "x"]] * 2


def test_a_glob_selects_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "b-1.npz", x=rows(1, first=1))
    np.savez(tmp_path / "b-0.npz", x=rows(1))
    np.savez(tmp_path / "other.npz", y=rows(1))
    np.testing.assert_array_equal(values(tmp_path / "b-*.npz"), rows(2))
    with pytest.raises(DataError, match="no file matches this pattern"):
        open_data(tmp_path / "c-*.npz", X)


@pytest.mark.parametrize(
    ("name", "form"), [("a.npz", "{folder}/**/*.npz"), ("a.JPG", "{{images: '{folder}/**/*', size: 224}}")]
)
def test_files_in_subfolders_need_a_glob(tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / name).touch()
    folder = tmp_path / "photos"
    with pytest.raises(DataError, match=r"its files are in folders of it") as error:
        open_data(Data(path=folder), X)
    assert error.value.cure == f"name them with a glob: {form.format(folder=folder)}"


def test_arrays_of_other_names_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, pixels=rows(2))
    np.testing.assert_array_equal(values(Data(path=path, names={"x": "pixels"})), rows(2))
    problems = {
        r"or map them: {arrays: d.npz, names: {x: pixels}}": path,
        "`names` refers to array 'pictures', which is not there": Data(path=path, names={"x": "pictures"}),
        r"`names` maps an array to 'y', which is not .*\n.*inputs: x": Data(path=path, names={"y": "pixels"}),
    }
    for problem, source in problems.items():
        with pytest.raises(DataError, match=problem):
            open_data(source, X)


@pytest.mark.parametrize("name", ["l.npy", "l.npz", "l.txt"])
def test_labels_may_be_in_a_separate_file(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "d.npz", x=rows(3), labels=np.zeros(3))
    labels = np.array([2, 0, 1])
    np.save(tmp_path / "l.npy", labels)
    np.savez(tmp_path / "l.npz", targets=labels)
    (tmp_path / "l.txt").write_text("2\n0\n1\n")
    source = Data(path=tmp_path / "d.npz", labels=tmp_path / name)
    np.testing.assert_array_equal(open_data(source, X).require_labels(), labels)
    np.savez(tmp_path / "d.npz", x=rows(2))
    with pytest.raises(DataError, match="3 labels for 2 samples"):
        open_data(source, X)


@pytest.mark.parametrize("text", ["one\n", "1 2\n", "\xff"])
def test_labels_that_are_no_numbers_are_an_error(tmp_path: Path, text: str) -> None:
    np.savez(tmp_path / "d.npz", x=rows(1))
    (tmp_path / "l.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"l\.txt: the labels are not one number a line"):
        open_data(Data(path=tmp_path / "d.npz", labels=tmp_path / "l.txt"), X)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """An image of 12 x 8 whose red channel is its column times ten, green its row, blue constant."""
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = np.arange(12) * 10, np.arange(8)[:, None], 200
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_an_image_is_cropped_at_the_centre_and_normalized(photo: Path) -> None:
    (sample,) = pictures(photo, resize=8, mean=(0.5, 0.0, 0.0), std=(0.5, 1.0, 2.0))
    red = (np.arange(3, 9) * 10 / 255 - 0.5) / 0.5
    np.testing.assert_allclose(sample[0], np.broadcast_to(red, (4, 6)), rtol=1e-6)
    np.testing.assert_allclose(sample[1][:, 0], np.arange(2, 6) / 255, rtol=1e-6)
    np.testing.assert_allclose(sample[2], 200 / 255 / 2, rtol=1e-6)
    (rgb,), (bgr,) = pictures(photo), pictures(photo, colors="bgr")
    np.testing.assert_array_equal(bgr, rgb[::-1])


@pytest.mark.parametrize(
    ("rules", "shape", "dtype"),
    [
        (ImageRules(size=(4, 6), layout="nhwc"), (1, 4, 6, 3), np.float32),
        (ImageRules(size=(4, 6), colors="gray"), (1, 1, 4, 6), np.float32),
        (ImageRules(size=(4, 6), scale=1, layout="nhwc"), (1, 4, 6, 3), np.uint8),
    ],
)
def test_layout_channels_and_pixels_without_scaling(
    photo: Path, rules: ImageRules, shape: tuple[int, ...], dtype: type[np.generic]
) -> None:
    inputs = {"image": InputSpec(dtype=np.dtype(dtype), shape=shape)}
    (feed,) = open_data(Data(path=photo, images=rules), inputs)
    assert (feed["image"].shape, feed["image"].dtype) == (shape, dtype)


@pytest.mark.parametrize("mode", ["PNG", "TIFF"])
def test_pixels_of_16_bits_keep_their_brightness(tmp_path: Path, mode: str) -> None:
    levels = np.tile(np.arange(6, dtype=np.uint16) * 12_800, (4, 1))
    Image.fromarray(levels).save(tmp_path / "x.img", mode)
    (tmp_path / "x.img").rename(tmp_path / "x.tif")
    (sample,) = pictures(tmp_path / "x.tif", scale=1.0)
    np.testing.assert_array_equal(sample, np.broadcast_to(levels // 256, (3, 4, 6)))


def test_the_orientation_of_a_photo_is_applied(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation 6: rotate by 90 degrees
    pixels = np.zeros((60, 40, 3), np.uint8)
    pixels[:30] = 255
    Image.fromarray(pixels).save(tmp_path / "x.jpg", exif=turned)
    (sample,) = pictures(tmp_path)
    assert sample[:, :, 0].max() < 0.1
    assert sample[:, :, -1].min() > 0.9


FITTED = ImageRules(size=(4, 6))
FLAT = ImageRules(size=(8, 6))


@pytest.mark.parametrize(
    ("name", "rules", "inputs", "problem", "cure"),
    [
        ("photo.png", FLAT, PICTURE, r"shape \[3, 8, 6\], where the model", "`size`, `layout` or"),
        ("photo.png", None, PICTURE, "no transform is given", "{images: 'photos/*.jpg', size: 224}"),
        (".", None, PICTURE, "no transform is given", "{images: 'photos/*.jpg', size: 224}"),
        ("photo.png", FITTED, TWO, "images are data for one input, and the model has 2", "inputs.values"),
        ("b.jpg", FITTED, PICTURE, r"b\.jpg: the image cannot be read", "take it out"),
        # floats from 0 to 1 would become a black image
        ("depth.tiff", FITTED, PICTURE, r"depth\.tiff: .* \(its pixels of mode F have no", "take it out"),
    ],
)
def test_images_that_cannot_be_the_input_are_an_error_with_the_cure(
    photo: Path, name: str, rules: ImageRules | None, inputs: dict, problem: str, cure: str
) -> None:
    (photo.parent / "b.jpg").write_bytes(b"no image")
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(photo.parent / "depth.tiff")
    with pytest.raises(DataError, match=problem) as caught:
        list(open_data(Data(path=photo.parent / name, images=rules), inputs))
    assert cure in str(caught.value.cure)


def test_the_digest_depends_on_content_and_transform(photo: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.array([1]))
    images = Data(path=photo, images=FITTED)
    brighter = Data(path=photo, images=ImageRules(size=(4, 6), mean=(0.5,)))
    sources = [photo, images, brighter, Data(path=photo, images=FITTED, labels=tmp_path / "l.npy")]
    before = {data_digest(source) for source in sources}
    photo.write_bytes(photo.read_bytes() + b" ")
    assert len({*before, data_digest(images)}) == len(sources) + 1
