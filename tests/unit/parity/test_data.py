"""Data as .npz and .npy files, folders, globs, images with a transform, arrays of other names, and random inputs."""

from __future__ import annotations

import gc
import io
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx_text import outputs_of, parsed
from PIL import Image

from qdqspec.accuracy.case_data import CaseData
from qdqspec.accuracy.data import Dataset, InputSpec, open_data
from qdqspec.app.preparation.stored import data_digest
from qdqspec.errors import DataError
from qdqspec.types import Data, ImageRules, Inputs, InputShape

FLOAT = np.dtype(np.float32)
IMAGE = {"x": InputSpec(dtype=FLOAT, shape=(1, 2, 3))}
IDS = {"ids": InputSpec(dtype=np.dtype(np.int64), shape=(1, 4))}
TWO = {**IMAGE, "mask": IDS["ids"]}
PICTURE = {"image": InputSpec(dtype=FLOAT, shape=(1, 3, 4, 6))}


def images(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first * 6, (first + count) * 6, dtype=np.float32).reshape(count, 2, 3)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save arrays as data.npz and return its path."""

    def save(**arrays: np.ndarray) -> Path:
        np.savez(tmp_path / "data.npz", **arrays)
        return tmp_path / "data.npz"

    return save


def together(data: Dataset) -> np.ndarray:
    return np.concatenate([feed["x"] for feed in data])


def values(source: Path | Data) -> np.ndarray:
    return together(open_data(source, IMAGE))


@pytest.mark.parametrize(
    ("batch", "samples", "problem", "cure"),
    [
        (2, (3, 5), r"shapes \[2, 3\] and \[2, 5\], and a batch of 2", "batch of 1"),
        (1, (12,), r"a sample of shape \[1, 2, 12\], where the case has", "max: [1, 2, 12]}}"),
    ],
)
def test_lengths_that_the_case_does_not_have_are_an_error_with_the_cure(
    tmp_path: Path, batch: int, samples: tuple[int, ...], problem: str, cure: str
) -> None:
    for number, length in enumerate(samples):
        np.savez(tmp_path / f"{number}.npz", x=np.zeros((4, 2, length), np.float32))
    span = InputShape(min=(1, 2, 0), opt=(1, 2, 3), max=(1, 2, 9))
    spec = InputSpec(dtype=FLOAT, shape=(batch, 2, 3), ranges=(span,), own=(None, 2, None))
    with pytest.raises(DataError, match=problem) as caught:
        open_data(tmp_path, {"x": spec})
    assert cure in (caught.value.cure or "")


def test_files_are_read_in_order_of_name_and_the_last_batch_is_filled_up_from_the_beginning(
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "b.npz", x=images(3, first=4), labels=np.array([4, 5, 6]))
    np.savez(tmp_path / "a.npz", x=images(4), labels=np.arange(4))
    data = open_data(tmp_path, {"x": InputSpec(dtype=FLOAT, shape=(3, 2, 3))})
    assert (len(data), data.samples, data.batch) == (3, 7, 3)
    for _ in range(2):  # a second pass yields the same rows
        np.testing.assert_array_equal(together(data), images(7)[[0, 1, 2, 3, 4, 5, 6, 0, 1]])
    np.testing.assert_array_equal(data.require_labels(), np.arange(7))
    (note,) = data.notes
    assert note.startswith("7 samples do not fill batches of 3: the last one is filled up with 2 repeated")


@pytest.mark.parametrize("names", [("x", "anchors"), ("anchors", "x")])
def test_samples_are_those_that_are_stacked_in_any_order_of_inputs(
    saved: Callable[..., Path], names: tuple[str, ...]
) -> None:
    """A batch of three images has one array of anchors."""
    specs = {"x": InputSpec(dtype=FLOAT, shape=(3, 2, 3)), "anchors": InputSpec(dtype=FLOAT, shape=(5, 4))}
    path = saved(x=images(7), anchors=np.ones((3, 5, 4)), labels=np.arange(7))
    data = open_data(path, {name: specs[name] for name in names})
    assert (len(data), data.samples, data.batch) == (3, 7, 3)
    assert len(data.require_labels()) == 7


@pytest.mark.parametrize(
    ("inputs", "arrays", "warnings"),
    [
        (IMAGE, {"x": np.zeros((3, 2, 3))}, ["every value of 'x' is 0, so that no range"]),
        (IMAGE, {"x": np.full((3, 2, 3), 0.5)}, ["every value of 'x' is 0.5"]),
        (IMAGE, {"x": images(1)}, ["it is a single sample"]),
        (IMAGE, {"x": images(2)}, []),
        (IDS, {"ids": np.zeros((2, 4), np.int64)}, []),  # token types and masks often are all zeros
    ],
)
def test_calibration_data_of_zeros_or_one_sample_is_reported(
    saved: Callable[..., Path], inputs: dict, arrays: dict[str, np.ndarray], warnings: list[str]
) -> None:
    found = list(open_data(saved(**arrays), inputs).doubts())
    assert len(found) == len(warnings)
    assert all(text.startswith(part) for text, part in zip(found, warnings, strict=True))


@pytest.mark.parametrize("dtype", [np.uint8, np.float64, ">f4"])
def test_arrays_are_cast_and_casts_of_unscaled_integers_reported(
    saved: Callable[..., Path], dtype: str
) -> None:
    data = open_data(saved(x=images(2).astype(dtype)), IMAGE)
    assert next(iter(data))["x"].dtype == np.float32
    np.testing.assert_array_equal(together(data), images(2))
    note = "array 'x' is uint8 and is given to the model as float32, unscaled"
    assert data.notes == ((note,) if dtype is np.uint8 else ())


def test_reading_a_large_array_needs_little_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((400, 2, 25_000), np.float32))  # 80 MB unpacked
    inputs = {"x": InputSpec(dtype=FLOAT, shape=(1, 2, 25_000))}
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_data(tmp_path / "d.npz", inputs)) == 400
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_a_file_that_is_not_read_to_its_end_is_closed_without_a_warning(tmp_path: Path, suffix: str) -> None:
    """Of an iterator and its file that an error holds, the collector may take the file first."""
    file = tmp_path / f"data.{suffix}"
    np.savez(file, x=images(3)) if suffix == "npz" else np.save(file, images(3))
    rows = iter(open_data(file, IMAGE))
    next(rows)
    (opened,) = (o for o in gc.get_objects() if isinstance(o, io.FileIO) and o.name in (str(file), file))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened.__del__()
    assert opened.closed


def test_an_array_in_column_major_order_is_read_unless_it_is_large(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.arange(12).reshape(3, 4).T  # as argmax(-1).T gives it
    data = open_data(saved(x=np.asfortranarray(images(4)), labels=labels), IMAGE)
    assert [feed["x"].tolist() for feed in data] == images(4)[:, None].tolist()
    assert data.require_labels().tolist() == labels.tolist()
    monkeypatch.setattr("qdqspec.accuracy.sources._LARGEST_ROW", 60)  # a row has 24 bytes
    with pytest.raises(DataError, match=r"array 'x' is stored column by column .* 96 bytes") as caught:
        open_data(saved(x=np.asfortranarray(images(4))), IMAGE)
    assert caught.value.cure == "save numpy.ascontiguousarray(array)"


def with_value(value: float) -> dict[str, np.ndarray]:
    """Images of which the last sample has a value."""
    changed = images(3).astype(np.float64)
    changed[2, 0, 0] = value
    return {"x": changed}


WRONG = [
    ({"y": images(2)}, "no array for the model's input 'x'"),
    ({"x": images(0)}, "array 'x' has no samples"),
    ({"x": np.zeros((2, 3), np.float32)}, "array 'x' has shape [2, 3]"),
    (
        {"x": np.zeros((2, 3, 3))},
        "N samples as [N, 2, 3], which are stacked, or N whole inputs as [N, 1, 2, 3]",
    ),
    ({"x": images(2).astype(complex)}, "array 'x' is complex128, and the model takes float32"),
    ({"x": np.float32(1)}, "array 'x' is a single number"),
    (with_value(np.nan), "array 'x' holds NaN or a value outside float32 in sample 2"),
    (with_value(-1e300), "array 'x' holds NaN or a value outside float32 in sample 2"),
]


@pytest.mark.parametrize(("arrays", "problem"), WRONG)
def test_arrays_that_do_not_fit_the_inputs_are_named(
    saved: Callable[..., Path], arrays: dict[str, np.ndarray], problem: str
) -> None:
    path = saved(**arrays)
    with pytest.raises(DataError) as caught:
        list(open_data(path, IMAGE))
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)
    assert caught.value.cure


def test_labels_are_not_proposed_as_an_input(saved: Callable[..., Path]) -> None:
    with pytest.raises(DataError) as caught:
        open_data(saved(labels=np.arange(2)), IMAGE)
    assert caught.value.cure == "its arrays: labels; save one under the name of each input"


@pytest.mark.parametrize("value", [50, -51])
def test_a_token_outside_the_table_names_file_array_sample_and_value(
    saved: Callable[..., Path], value: int
) -> None:
    text = "net (int64[1,4] ids) => (float[1,4,3] y) { i = Cast<to = 6>(ids) y = Gather(table, i) }"
    specs = CaseData(parsed(text, table=(50, 3)), Inputs()).specs
    ids = np.array([[0, 49, -50, 1], [0, value, 0, 0]])
    assert len(list(open_data(saved(ids=ids[:1]), specs))) == 1
    said = rf"data\.npz: array 'ids' has {value} in sample 1, .*a table of 50 rows"
    with pytest.raises(DataError, match=said):
        list(open_data(saved(ids=ids), specs))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.npz", "there is no such data file"),
        ("c-*.npz", "no file matches this pattern"),
        ("empty", r"holds no \.npz or \.npy file"),
        ("data.npz", "unequal numbers of samples: 'x' 2, 'z' 3"),
    ],
)
def test_missing_files_and_unequal_numbers_of_samples_are_errors(
    saved: Callable[..., Path], tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    saved(x=images(2), z=images(3))
    with pytest.raises(DataError, match=problem):
        open_data(tmp_path / name, IMAGE | {"z": IMAGE["x"]})


def test_a_file_of_labels_alone_among_the_samples_is_an_error_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "a.npz", x=images(3))
    np.savez(tmp_path / "data" / "b.npz", labels=np.arange(3))
    np.save(tmp_path / "l.npy", np.arange(3))
    with pytest.raises(DataError, match=r"b\.npz: it has no array beside 'labels'") as caught:
        open_data(Data(path=tmp_path / "data", labels=tmp_path / "l.npy"), IMAGE)
    assert "take it out" in str(caught.value.cure)


def test_samples_cannot_be_stacked_to_a_batch_of_none(saved: Callable[..., Path]) -> None:
    spec = InputSpec(dtype=FLOAT, shape=(0, 2, 3))
    with pytest.raises(DataError, match=r"data\.npz: samples of array 'x' make batches") as caught:
        open_data(saved(x=images(3)), {"x": spec})
    assert "inputs: {shapes: {x: [1, 2, 3]}}" in str(caught.value.cure)
    assert len(open_data(saved(x=np.ones((3, 0, 2, 3), np.float32)), {"x": spec})) == 3  # whole inputs


def test_data_of_a_model_without_inputs_is_an_error(saved: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"data\.npz: the model has no inputs, so it needs no data"):
        open_data(saved(x=images(3)), {})


def test_an_array_for_no_input_is_ignored_with_a_note(saved: Callable[..., Path]) -> None:
    """One number and pickled objects are common beside samples."""
    names = np.array(["a", "b"], dtype=object)
    data = open_data(saved(x=images(2), lables=np.arange(2), seed=np.array(3), names=names), IMAGE)
    assert data.ignored == ("lables", "seed", "names")
    assert "array 'lables' is no input of the model and is not used (did you mean 'labels'?)" in data.notes
    np.testing.assert_array_equal(together(data), images(2))
    with pytest.raises(DataError, match=r"no array 'labels' \(did you mean 'lables'\?\)"):
        data.require_labels()


def test_an_array_with_a_wrong_checksum_is_an_error(saved: Callable[..., Path]) -> None:
    path = saved(x=images(50_000))
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 16] ^= 1  # the checksum in the archive's directory
    path.write_bytes(content)
    with pytest.raises(DataError, match="array 'x' cannot be read"):
        list(open_data(path, IMAGE))


def test_random_integers_cover_the_rows_of_their_table_or_the_type_that_is_dequantized() -> None:
    text = """g (int32[1,400] ids, int64[1,400,1] mask, int8[4000] a, uint8[4000] b, int32[4000] c)
        => (float[1,400,4] y, float[4000] d, float[4000] e, float[4000] f) <float s = {1}> {
          wide = Cast<to = 7>(ids)  rows = Gather(table, wide)
          weights = Cast<to = 1>(mask)  y = Mul(rows, weights)
          d = DequantizeLinear(a, s)  e = DequantizeLinear(b, s)  f = DequantizeLinear(c, s) }"""
    model = parsed(text, table=(37, 4))
    feeds = list(CaseData(model, Inputs(), seed=1).random(5))
    for feed in feeds:
        outputs_of(model, feed)  # raises where an index is out of range
    ids = np.concatenate([feed["ids"] for feed in feeds])
    assert ids.dtype == np.int32
    assert set(np.unique(ids)) == set(range(37))
    assert set(np.unique(feeds[0]["mask"])) == {0, 1}
    assert (feeds[0]["a"].min(), feeds[0]["a"].max()) == (-128, 127)
    assert (feeds[0]["b"].min(), feeds[0]["b"].max()) == (0, 255)
    assert -(2**15) <= feeds[0]["c"].min() < -30000 < 30000 < feeds[0]["c"].max() < 2**15


def test_the_seed_determines_the_feeds_and_samples_differ() -> None:
    model = parsed("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    one, two = (feed["x"] for feed in CaseData(model, Inputs(), seed=5).random(2))
    assert (one.dtype, one.shape) == (np.float32, (2, 3))
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(CaseData(model, Inputs(), seed=5).sample["x"], one)
    assert not np.array_equal(CaseData(model, Inputs(), seed=6).sample["x"], one)


def pictures(path: Path, **rules: object) -> np.ndarray:
    """The samples of images, scaled to 4 x 6."""
    data = open_data(Data(path=path, images=ImageRules(size=(4, 6), **rules)), PICTURE)
    return np.concatenate([feed["image"] for feed in data])


@pytest.mark.parametrize(
    "saved", [images(4), images(4)[:, None], images(1)[0]], ids=["samples", "whole inputs", "one sample"]
)
def test_an_npy_file_contains_the_samples_of_the_only_input(tmp_path: Path, saved: np.ndarray) -> None:
    np.save(tmp_path / "any.npy", saved)
    np.testing.assert_array_equal(values(tmp_path / "any.npy"), saved.reshape(-1, 2, 3))


def test_npy_files_are_samples_in_order_of_name_or_inputs_by_name(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        np.save(tmp_path / f"sample-{number}.npy", images(1, first=number)[0])
    np.save(tmp_path / "labels.npy", np.array([7, 8, 9]))
    np.testing.assert_array_equal(values(tmp_path), images(3))
    np.testing.assert_array_equal(open_data(tmp_path, IMAGE).require_labels(), [7, 8, 9])
    (tmp_path / "two").mkdir()
    np.save(tmp_path / "two" / "x.npy", images(2))
    np.save(tmp_path / "two" / "mask.npy", np.ones((2, 4), np.int64))
    assert [sorted(feed) for feed in open_data(tmp_path / "two", TWO)] == [["mask", "x"]] * 2


@pytest.mark.parametrize(
    ("name", "form"), [("a.npz", "{folder}/**/*.npz"), ("a.JPG", "{{images: '{folder}/**/*', size: 224}}")]
)
def test_files_in_subfolders_need_a_glob(tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / name).touch()
    folder = tmp_path / "photos"
    with pytest.raises(DataError, match=r"its files are in folders of it") as error:
        open_data(Data(path=folder), IMAGE)
    assert error.value.cure == f"name them with a glob: {form.format(folder=folder)}"


def test_arrays_of_other_names_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, pixels=images(2))
    np.testing.assert_array_equal(values(Data(path=path, names={"x": "pixels"})), images(2))
    problems = {
        r"or map them: {arrays: d.npz, names: {x: pixels}}": path,
        "`names` refers to array 'pictures', which is not there": Data(path=path, names={"x": "pictures"}),
        r"`names` maps an array to 'y', which is not .*\n.*inputs: x": Data(path=path, names={"y": "pixels"}),
    }
    for problem, source in problems.items():
        with pytest.raises(DataError, match=problem):
            open_data(source, IMAGE)


@pytest.mark.parametrize("name", ["l.npy", "l.npz", "l.txt"])
def test_labels_may_be_in_a_separate_file(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "d.npz", x=images(3), labels=np.zeros(3))
    labels = np.array([2, 0, 1])
    np.save(tmp_path / "l.npy", labels)
    np.savez(tmp_path / "l.npz", targets=labels)
    (tmp_path / "l.txt").write_bytes(b"\xef\xbb\xbf2\r\n0\r\n1\r\n")  # as Windows' Notepad writes it
    source = Data(path=tmp_path / "d.npz", labels=tmp_path / name)
    np.testing.assert_array_equal(open_data(source, IMAGE).require_labels(), labels)
    np.savez(tmp_path / "d.npz", x=images(2))
    with pytest.raises(DataError, match="3 labels for 2 samples"):
        open_data(source, IMAGE)


def test_folders_may_have_npy_files_of_the_same_names(tmp_path: Path) -> None:
    """One for each input, or samples with their labels."""
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        for name in ("x", "z", "s1", "s2"):
            np.save(tmp_path / folder / f"{name}.npy", images(1, first=number))
        np.save(tmp_path / folder / "labels.npy", np.full(2, number))
    two = open_data(tmp_path / "*" / "[xz].npy", IMAGE | {"z": IMAGE["x"]})
    np.testing.assert_array_equal(together(two), images(2))
    parts = open_data(tmp_path / "*" / "[sl]*.npy", IMAGE)
    np.testing.assert_array_equal(together(parts), images(2)[[0, 0, 1, 1]])
    np.testing.assert_array_equal(parts.require_labels(), [0, 0, 1, 1])


def test_labels_of_files_whose_order_of_name_is_not_that_of_their_numbers_are_noted(tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.arange(3))
    for name in ("s1", "s2", "s10"):
        np.save(tmp_path / f"{name}.npy", images(1)[0])
    data = open_data(Data(path=tmp_path / "s*.npy", labels=tmp_path / "l.npy"), IMAGE)
    assert data.notes == (
        "files are read in order of name, s2.npy after s10.npy: labels must be in this order",
    )
    (tmp_path / "s10.npy").rename(tmp_path / "s3.npy")
    assert not open_data(Data(path=tmp_path / "s*.npy", labels=tmp_path / "l.npy"), IMAGE).notes


@pytest.mark.parametrize("text", ["one\n", "1 2\n", "\xff"])
def test_labels_that_are_no_numbers_are_an_error(tmp_path: Path, text: str) -> None:
    np.savez(tmp_path / "d.npz", x=images(1))
    (tmp_path / "l.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"l\.txt: the labels are not one number a line"):
        open_data(Data(path=tmp_path / "d.npz", labels=tmp_path / "l.txt"), IMAGE)


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


def test_an_image_is_resized_and_cut_to_the_pixels_that_torchvision_takes(tmp_path: Path) -> None:
    """Its ``Resize`` cuts the longer side off to whole pixels, and its ``CenterCrop`` rounds halves to even."""
    pixels = np.random.default_rng(0).integers(0, 255, (7, 12, 3), np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "x.png")
    expected = np.asarray(image.resize((13, 8), Image.Resampling.BILINEAR))[2:6, 4:10]
    (sample,) = pictures(tmp_path / "x.png", resize=8, scale=1.0, layout="nchw")
    np.testing.assert_array_equal(sample, expected.transpose(2, 0, 1))


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


@pytest.mark.parametrize("name", ["x.png", "x.tif"])
def test_pixels_of_16_bits_keep_their_brightness(tmp_path: Path, name: str) -> None:
    levels = np.tile(np.arange(6, dtype=np.uint16) * 12_800, (4, 1))
    Image.fromarray(levels).save(tmp_path / name)
    (sample,) = pictures(tmp_path / name, scale=1.0)
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
