"""Data in a spec: a path, a glob, or a table."""

from __future__ import annotations

import pytest

from qdqspec import load_spec
from qdqspec.errors import SpecError
from qdqspec.types import Data, ImageRules

HEAD = "qdqspec: 1\nmodel: m.onnx\nchecks: [{kind: speedup, min: 1.2}]\n"


@pytest.fixture
def data_of(tmp_path):
    def read(text):
        path = tmp_path / "s.qdq.yaml"
        path.write_text(f"{HEAD}inputs: {{calibration: {text}}}\n")
        return load_spec(path, root=tmp_path).cases()[0].inputs.calibration

    return read


@pytest.mark.parametrize("text", ["{arrays: d.npz}", "'d[1].npz'"])
def test_data_given_as_a_path_is_that_path(data_of, tmp_path, text):
    name = text.strip("'{}").removeprefix("arrays: ")
    assert data_of(text) == tmp_path / name


def test_the_keys_of_an_image_transform(data_of, tmp_path):
    found = data_of(
        "{images: data/*.jpg, size: 224, resize: 256, mean: [0.485, 0.456, 0.406], std: [0.2, 0.3, 0.4], layout: nhwc}"
    )
    assert found == Data(
        path=tmp_path / "data" / "*.jpg",
        images=ImageRules(
            size=(224, 224), resize=256, mean=(0.485, 0.456, 0.406), std=(0.2, 0.3, 0.4), layout="nhwc"
        ),
    )
    assert data_of("{images: data, size: [480, 640]}").images.size == (480, 640)


def test_a_mean_or_std_of_one_number_applies_to_all_channels(data_of):
    rules = data_of("{images: data, size: 3, mean: 127.5, std: 128}").images
    assert (rules.mean, rules.std) == ((127.5,), (128,))
    assert data_of("{images: data, size: 3, mean: [127.5], std: [128]}").images == rules


def test_the_keys_loader_names_and_labels(data_of, tmp_path):
    assert data_of("{loader: mine}") == Data(loader="mine")
    found = data_of("{arrays: d.npz, names: {x: pixels}, labels: l.txt}")
    assert found == Data(path=tmp_path / "d.npz", names={"x": "pixels"}, labels=tmp_path / "l.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{names: {x: y}}", "one of arrays, images and loader is needed"),
        ("{arrays: a.npz, size: 3}", "'size' is a key of images"),
        ("{images: a.jpg}", "images need a size"),
        ("{images: a.jpg, size: 3, mean: [1, 2]}", "'mean' has one number, or one for each of 3 channels"),
        ("{images: a.jpg, size: 3, std: 0}", "greater than 0"),
        ("{images: a.jpg, size: 30, resize: 3}", "'resize' is smaller than 'size'"),
        ("{images: a.jpg, size: 3, layot: nchw}", "did you mean 'layout'"),
        ("../far/*.npz", "leads out of the root directory"),
        ("[a.npz, b.npz]", "'calibration' should be a path, not a list"),
    ],
)
def test_invalid_data_is_an_error(data_of, text, message):
    with pytest.raises(SpecError, match=message):
        data_of(text)


def test_a_glob_that_follows_a_link_out_of_the_root_is_an_error(data_of, tmp_path, tmp_path_factory):
    far = tmp_path_factory.mktemp("far")
    (far / "a.npz").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.npz").symlink_to(far / "a.npz")
    with pytest.raises(SpecError, match="leads out of the root directory"):
        data_of("data/*.npz")
