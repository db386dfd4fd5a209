from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytime.data.plain_pickle import load
from anytime.errors import FormatError

PLAIN = {
    b"batch_label": b"testing batch 1 of 1",
    "labels": [0, 255, 70_000, -5, 2**40],
    "nested": {"tuple": (1, (2.5, None), (True, False), (), (1, 2, 3, 4)), "same": ["x"] * 3},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_pickle_would(protocol: int) -> None:
    assert load(pickle.dumps(PLAIN, protocol=protocol), path="file") == PLAIN


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i4", "<i8"])
def test_arrays_of_integers_are_read(protocol: int, dtype: str) -> None:
    array = np.arange(24).astype(dtype).reshape(4, 6)
    for values in (array, np.asfortranarray(array)):
        found = load(pickle.dumps({"data": values}, protocol=protocol), path="file")["data"]
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)


def test_the_pickles_of_python_2_are_read() -> None:
    """As the official batches are: strings are bytes, arrays come from numpy.core.multiarray."""
    raw = bytes(range(6))
    written = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06" + raw + b"tbU\x06labelsq\x07]q\x08(K\x05K\x07eu."
    )
    found = load(written, path="file")
    assert found[b"labels"] == [5, 7]
    np.testing.assert_array_equal(found[b"data"], np.frombuffer(raw, np.uint8).reshape(2, 3))


class Attack:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    for attack in (
        Attack(os.system, f"touch {canary}"),
        Attack(eval, f"open({str(canary)!r}, 'w')"),
        Attack(getattr, "a", "upper"),
        Attack(np.load, str(canary)),
    ):
        with pytest.raises(FormatError):
            load(pickle.dumps({"data": attack}, protocol=protocol), path="file")
        assert not canary.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        pickle.dumps(PLAIN)[:-7],
        pickle.dumps(np.array([object()], dtype=object)),
        pickle.dumps(np.zeros(3)),
        b"cnumpy\ndtype\n.",
        b"\x80\x02cnumpy\ndtype\n}b.",
        b"\x80\x02]K\x01K\x02s.",
        b"\x80\x02K\x01\x87.",
        b"\x80\x02e.",
        b"\x80\x02h\x05.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
    ],
)
def test_what_is_not_plain_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        load(data, path="file")


def test_an_array_must_have_the_bytes_its_shape_asks_for() -> None:
    good = pickle.dumps(np.zeros((2, 3), np.uint8), protocol=2)
    assert good.count(b"K\x02K\x03\x86") == 1
    with pytest.raises(FormatError, match="shape"):
        load(good.replace(b"K\x02K\x03\x86", b"K\xffK\xff\x86"), path="file")


def test_a_list_named_many_times_is_read_once() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    assert len(load(pickle.dumps(bomb), path="file")) == 2
