"""A fitted object's file gives the object back, or says what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from anytime.errors import AnytimeError, FileError, FormatError, IntegrityError, MissingFileError, OptionError, ShapeError
from anytime.fitted import Fitted, _checksum, read_document


@dataclass(frozen=True)
class Sample(Fitted, kind="sample"):
    """One field of every type."""

    number: float
    whole: int
    text: str
    flag: bool
    nothing: None
    numbers: tuple[float, ...]
    nested: tuple[tuple[int, ...], ...]
    table: dict[str, Any]
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Apart(Fitted, kind="apart"):
    """A subclass that leaves comparisons to the base class."""

    limit: float


@dataclass(frozen=True)
class Other(Fitted, kind="other"):
    """Another kind with fewer fields."""

    limit: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.limit > 0:
            raise OptionError(f"limit is {self.limit}", expected="above 0", fix="raise it")


def sample(**changes: Any) -> Sample:
    values: dict[str, Any] = {
        "number": 0.1,
        "whole": -3,
        "text": 'τ ≤ 0.5 "quoted"\n\\ \ud83d\ude00'.encode("utf-16", "surrogatepass").decode("utf-16"),
        "flag": True,
        "nothing": None,
        "numbers": (1.5, math.inf, -math.inf, 5e-324, 1.7976931348623157e308),
        "nested": ((), (1,), (2, 3)),
        "table": {"float": 1.0, "tensor": (torch.arange(3),), "": {}},
        "tensor": torch.linspace(0, 1, 7),
    }
    return Sample(exits=7, classes=10, **{**values, **changes})


def test_every_type_of_field_comes_back_as_it_was(tmp_path: Path) -> None:
    before = sample()
    after = Sample.load(before.save(tmp_path / "sample.json"))
    for name in ("exits", "classes", "number", "whole", "text", "flag", "nothing", "numbers", "nested"):
        assert getattr(after, name) == getattr(before, name)
        assert type(getattr(after, name)) is type(getattr(before, name))
    assert torch.equal(after.tensor, before.tensor)
    assert list(after.table) == ["float", "tensor", ""]
    assert after.table["float"] == 1.0
    assert torch.equal(after.table["tensor"][0], torch.arange(3))
    assert after.table[""] == {}
    assert math.isnan(Sample.load(sample(number=math.nan).save(tmp_path / "nan.json")).number)


@pytest.mark.parametrize("count", [0, 1, 256, 257, 3000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
def test_tensors_of_any_size_and_type_come_back_to_the_bit(tmp_path: Path, count: int, dtype: torch.dtype) -> None:
    values = (1e3 * torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)).to(dtype)
    if dtype.is_floating_point and count > 1:
        values[:2] = torch.tensor([math.inf, math.nan])
    tensor = values.reshape(count, 1) if count else values.reshape(0, 4)
    after = Sample.load(sample(tensor=tensor).save(tmp_path / "sample.json")).tensor
    assert after.dtype == dtype
    assert after.shape == tensor.shape
    assert torch.equal(after.nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_objects_are_equal_if_their_files_are() -> None:
    assert sample() == sample()
    assert hash(sample()) == hash(sample())
    assert sample(tensor=torch.zeros(2)) != sample(tensor=torch.ones(2))
    assert sample(number=math.nan) == sample(number=math.nan)
    assert sample() != Other(exits=2, classes=None, limit=0.25)
    assert Apart(exits=2, classes=None, limit=0.25) == Apart(exits=2, classes=None, limit=0.25)
    assert Apart(exits=2, classes=None, limit=0.25) != Apart(exits=2, classes=None, limit=0.5)


def test_a_tensor_that_cannot_be_kept_exactly_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="float16"):
        sample(tensor=torch.zeros(2, dtype=torch.float16)).save(tmp_path / "sample.json")
    assert not list(tmp_path.iterdir())


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = Other(exits=2, classes=None, limit=0.25).save(tmp_path / "other.json")
    data = path.read_bytes()
    for end in range(len(data.rstrip())):
        path.write_bytes(data[:end])
        with pytest.raises(IntegrityError, match="is damaged"):
            Other.load(path)


def test_a_changed_byte_is_noticed_unless_it_changes_nothing(tmp_path: Path) -> None:
    wanted = Other(exits=2, classes=None, limit=0.25)
    path = wanted.save(tmp_path / "other.json")
    data = path.read_bytes()
    noticed = 0
    for place in range(len(data)):
        for flip in (1, 4, 32, 128):
            path.write_bytes(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
            try:
                assert Other.load(path) == wanted
            except FileError:
                noticed += 1
    assert noticed > 3.5 * len(data.split(b'"fields"')[1])


def forged(change: Callable[[dict[str, Any]], None]) -> str:
    """A document that was changed by someone who can compute checksums."""
    document = sample().document()
    del document["sha256"]
    change(document)
    return json.dumps({**document, "sha256": _checksum(document)})


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no fields": lambda d: d.pop("fields"),
    "fields are a list": lambda d: d.update(fields=[1, "a"]),
    "fields are a number": lambda d: d.update(fields=5),
    "a field is missing": lambda d: d["fields"].pop("number"),
    "a field too many": lambda d: d["fields"].update(more=1),
    "an unknown value": lambda d: d["fields"].update(number={"complex": "1j"}),
    "a float that is none": lambda d: d["fields"].update(number={"float": "one"}),
    "a negative number of exits": lambda d: d["fields"].update(exits=-1),
    "exits in words": lambda d: d["fields"].update(exits="seven"),
    "a tensor of another size": lambda d: d["fields"].update(tensor={"tensor": "float32", "shape": [3], "data": [1, 2]}),
    "a tensor of another type": lambda d: d["fields"].update(tensor={"tensor": "complex64", "shape": [1], "data": [1]}),
    "a tensor of words": lambda d: d["fields"].update(tensor={"tensor": "float32", "shape": [1], "data": ["a"]}),
    "a tensor of broken base64": lambda d: d["fields"].update(tensor={"tensor": "float32", "shape": [1], "data": "!"}),
    "a tensor of odd bytes": lambda d: d["fields"].update(tensor={"tensor": "float32", "shape": [1], "data": "AAA="}),
    "a tensor too large": lambda d: d["fields"].update(tensor={"tensor": "int64", "shape": [1], "data": [2**70]}),
    "a tensor shaped in words": lambda d: d["fields"].update(tensor={"tensor": "int64", "shape": ["a"], "data": [1]}),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_document_with_a_right_checksum_and_wrong_contents_is_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "forged.json"
    path.write_text(forged(change))
    with pytest.raises(FormatError) as caught:
        Sample.load(path)
    assert caught.value.path == path
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\0", "[" * 100_000, '{"format": "other"}', "\ufeff{}"])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "else.json"
    path.write_text(text)
    with pytest.raises(FileError):
        read_document(path)


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    body = json.dumps(Other(exits=2, classes=None, limit=0.25).document())
    for depth in (10, *range(800, 1010), 5000):  # around the depth at which Python gives up
        path.write_text(body[:-1] + ', "more": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(IntegrityError):
            read_document(path)


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="there is no"):
        Sample.load(tmp_path / "none.json")
    with pytest.raises(FormatError, match="is a folder"):
        Sample.load(tmp_path)


def test_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    path = Other(exits=2, classes=None, limit=0.25).save(tmp_path / "other.json")
    with pytest.raises(FormatError, match="holds a other") as caught:
        Sample.load(path)
    assert caught.value.expected == "a sample"
    assert read_document(path)["kind"] == "other"
    document = {**Other(exits=2, classes=None, limit=0.25).document(), "version": 2}
    del document["sha256"]
    path.write_text(json.dumps({**document, "sha256": _checksum(document)}))
    with pytest.raises(FormatError, match="holds version 2"):
        Other.load(path)


def test_the_objects_own_checks_hold_for_files_too(tmp_path: Path) -> None:
    document = Other(exits=2, classes=None, limit=0.25).document()
    del document["sha256"]
    document["fields"]["limit"] = -1.0
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**document, "sha256": _checksum(document)}))
    with pytest.raises(FormatError, match=r"limit is -1\.0"):
        Other.load(path)


def test_logits_of_another_size_are_refused() -> None:
    fitted = Other(exits=2, classes=10, limit=1.0)
    fitted.check_fits(2, 10)
    for exits, classes in ((3, 10), (1, 10), (2, 9), (2, 100)):
        with pytest.raises(ShapeError, match=f"{exits} exits and {classes} classes") as caught:
            fitted.check_fits(exits, classes)
        assert caught.value.expected == "2 exits and 10 classes, for which this Other was fitted"
    any_classes = Other(exits=2, classes=None, limit=1.0)
    any_classes.check_fits(2, 1000)
    with pytest.raises(ShapeError):
        any_classes.check_fits(3, 1000)


@pytest.mark.parametrize(("exits", "classes"), [(0, 1), (-1, 1), (True, 1), (1.0, 1), ("2", 1), (1, 0), (1, 2.5), (1, False)])
def test_sizes_that_make_no_sense_are_refused(exits: Any, classes: Any) -> None:
    with pytest.raises(OptionError):
        Other(exits=exits, classes=classes, limit=1.0)


def test_saving_over_an_old_file_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Other(exits=2, classes=None, limit=0.25).save(tmp_path / "other.json")
    monkeypatch.setattr("os.replace", lambda *_, **__: (_ for _ in ()).throw(OSError("no space")))
    monkeypatch.setattr("pathlib.Path.replace", lambda *_, **__: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises((AnytimeError, OSError)):
        Other(exits=3, classes=None, limit=0.5).save(path)
    assert Other.load(path).exits == 2
