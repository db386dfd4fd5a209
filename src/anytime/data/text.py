"""Labelled texts: five published sets, from sentiment with 2 classes to intents with 150, and their rows of word pieces.

Each set is one parquet file with the columns `split`, `text` and `label`.

| name | classes | splits |
| --- | --- | --- |
| `imdb` | 2 | 25,000 train, 25,000 test; 123 texts stand in both |
| `sst2` | 2 | 60,614 train, 6,735 val, 872 test |
| `trec` | 6, or 50 fine ones | 5,452 train, 500 test |
| `banking77` | 77 | 10,003 train, 3,080 test |
| `clinc150` | 150 | 15,000 train, 3,000 val, 4,500 test; out of scope: 100 oos_train, 100 oos_val, 1,000 oos_test |

Texts are `TextData`; `tokenize` makes of them `TokenData`, which networks read, and `plan_batches` puts rows of similar length
together, so that little of a batch is padding. The folder of a training run keeps its tokenizer (`save_tokenizer`), so that
`read_text_input` gives its network any other text.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from anytime.artifacts import check_sealed, write_text
from anytime.checks import LARGEST_OLD_SEED, check_labels, check_seed
from anytime.data.wordpiece import WordPiece
from anytime.errors import DtypeError, FormatError, IntegrityError, MissingExtraError, MissingFileError, OptionError, ShapeError
from anytime.reading import is_file, parsing, read_json

TextName = Literal["imdb", "sst2", "trec", "banking77", "clinc150"]

_SENTIMENTS = ("negative", "positive")
_OUT_OF_SCOPE = "oos"
_VOCABULARY, _DESCRIPTION, _DIGEST = "vocab.txt", "data.json", "vocabulary_sha256"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_MOST_ROWS, _LONGEST = 10**7, 1 << 16
_TOKENIZER = ("lower", "accents", "chinese", "prefix", "longest")
# From the one that is kept as it is to those that give way, where a text stands in several.
_PRECEDENCE = ("test", "val", "train")


@dataclass(frozen=True, eq=False)
class TextData:
    """Labelled texts of one split.

    Attributes:
        name: Which data set, such as `banking77`.
        split: `train`, `val` or `test`, or one of those after `oos_`.
        texts: The texts.
        labels: `(N,)`, int64.
        class_names: One name a class.
        rows: `(N,)`, int64: where each text stands in its published split.
    """

    name: str
    split: str
    texts: tuple[str, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    rows: Tensor

    def __post_init__(self) -> None:
        check_labels(self.labels, batch=len(self.texts), classes=len(self.class_names))
        _check_rows(self.rows, len(self.texts))

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def take(self, index: Tensor, *, split: str | None = None) -> Self:
        """The texts at `index`, in that order, as a set of their own."""
        texts = tuple(self.texts[at] for at in index.tolist())
        return replace(self, split=split or self.split, texts=texts, labels=self.labels[index], rows=self.rows[index])


@dataclass(frozen=True, eq=False)
class TokenData:
    """Labelled rows of word pieces of one split, all filled up to one length.

    Attributes:
        name: Which data set.
        split: As in `TextData`.
        ids: `(N, length)`, int64: the numbers of the pieces.
        lengths: `(N,)`, int64: how many of each row are no padding.
        labels: `(N,)`, int64.
        class_names: One name a class.
        rows: `(N,)`, int64: where each text stands in its published split.
        pad: The number that rows are filled up with.
    """

    name: str
    split: str
    ids: Tensor
    lengths: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    rows: Tensor
    pad: int = 0

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64:
            raise DtypeError(
                f"word pieces of {self.name} have element type {self.ids.dtype}", expected="int64", fix="convert: ids.long()"
            )
        if self.ids.ndim != 2 or self.lengths.shape != self.ids.shape[:1]:
            raise ShapeError(
                f"word pieces of {self.name} have shape {tuple(self.ids.shape)}, their lengths {tuple(self.lengths.shape)}",
                expected="(N, length) and (N,)",
                fix="make both with WordPiece.encode",
            )
        if len(self) and not 1 <= int(self.lengths.min()) <= int(self.lengths.max()) <= self.ids.shape[1]:
            raise ShapeError(
                f"lengths of {self.name} range from {int(self.lengths.min())} to {int(self.lengths.max())}",
                expected=f"from 1 to {self.ids.shape[1]}, as long as the rows",
                fix="make both with WordPiece.encode",
            )
        check_labels(self.labels, batch=len(self.ids), classes=len(self.class_names))
        _check_rows(self.rows, len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def length(self) -> int:
        """Pieces a row, padding included."""
        return self.ids.shape[1]

    def take(self, index: Tensor, *, split: str | None = None) -> Self:
        """The rows at `index`, in that order, as a set of their own."""
        parts = {name: getattr(self, name)[index] for name in ("ids", "lengths", "labels", "rows")}
        return replace(self, split=split or self.split, **parts)

    def to(self, device: torch.device | str) -> Self:
        """The same set on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("ids", "lengths", "labels", "rows")})


class Batch(NamedTuple):
    """Rows that go through a network together.

    Attributes:
        rows: Where they stand in the data, `(batch,)`, int64, on the CPU.
        length: How many pieces of them are read: `data.ids[rows, :length]`.
    """

    rows: Tensor
    length: int


Texts = TypeVar("Texts", TextData, TokenData)


def load_text(
    name: TextName, root: str | Path | None = None, *, fine: bool = False, distinct: bool = False
) -> dict[str, TextData]:
    """The splits of a published set by name; `train` and `test` are always among them.

    Out-of-scope queries of CLINC150 are splits with one class of their own, `oos`: they have none of the 150.

    Args:
        name: `imdb`, `sst2`, `trec`, `banking77` or `clinc150`.
        root: The folder with the parquet files; by default `data/text` in the folder that `ANYTIME_SHARED` names.
        fine: Whether to take the 50 fine classes of TREC.
        distinct: Whether to leave out, of the training and validation rows, texts that stood before: among the test rows,
            among the validation rows, or earlier in their split. The test rows stay as published.
    """
    if name not in get_args(TextName):
        raise OptionError(
            f"the data set {name!r}", expected=f"one of {', '.join(get_args(TextName))}", fix="choose one of those"
        )
    if fine and name != "trec":
        raise OptionError(f"fine classes of {name!r}", expected="fine=True with trec alone", fix="leave fine out")
    path = _folder(root) / f"{name}.parquet"
    columns = _read(path, ("split", "text", "fine" if fine else "label"))
    splits = _splits(name, *columns, path=path)
    return _without_repeats(splits) if distinct else splits


def repeated(data: TextData, other: TextData) -> Tensor:
    """Which texts of `data` stand in `other` as well, letter by letter: `(N,)`, bool.

    >>> one, two = (TextData("x", "train", texts, torch.zeros(2).long(), ("a",), torch.arange(2)) for texts in ("ab", "bc"))
    >>> repeated(one, two).tolist()
    [False, True]
    """
    known = set(other.texts)
    return torch.tensor([text in known for text in data.texts], dtype=torch.bool)


def draw_classes(classes: int, count: int, *, seed: int = 0) -> tuple[int, ...]:
    """`count` of `classes` classes, drawn by `seed`, in ascending order; a smaller draw is a part of a larger one.

    >>> draw_classes(150, 3), draw_classes(150, 4)
    ((33, 62, 114), (33, 62, 107, 114))
    """
    if not 1 <= count <= classes:
        raise OptionError(f"{count} of {classes} classes", expected=f"1 to {classes}", fix="correct count")
    # RandomState's stream is frozen by NumPy's promise: the same seed is the same draw for good.
    return tuple(sorted(np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED)).permutation(classes)[:count].tolist()))


def take_classes(data: Texts, classes: Sequence[int]) -> Texts:
    """The rows of some classes, whose labels then count from 0 in the order given.

    Args:
        data: Texts, or rows of word pieces.
        classes: Which, as numbers of classes of `data`, such as `draw_classes` gives.
    """
    chosen = list(classes)
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= label < data.classes for label in chosen):
        raise OptionError(
            f"classes {chosen}", expected=f"different classes from 0 to {data.classes - 1}", fix="draw_classes draws some"
        )
    places = torch.full((data.classes,), -1, device=data.labels.device)
    places[chosen] = torch.arange(len(chosen), device=places.device)
    labels = places[data.labels]
    index = (labels >= 0).nonzero()[:, 0]
    kept = data.take(index)
    # Labels and names change together: in between they would not fit.
    return replace(kept, labels=labels[index], class_names=tuple(data.class_names[label] for label in chosen))


def tokenize(data: TextData, tokenizer: WordPiece, *, length: int) -> TokenData:
    """Texts as rows of word pieces.

    Args:
        data: The texts.
        tokenizer: That of the encoder.
        length: Pieces a row, `[CLS]` and `[SEP]` included; longer texts lose their end.
    """
    ids, lengths = tokenizer.encode(data.texts, length=length)
    return TokenData(data.name, data.split, ids, lengths, data.labels, data.class_names, data.rows, tokenizer.pad)


def collect_vocabulary(texts: Iterable[str], *, size: int) -> WordPiece:
    """A tokenizer for an encoder that begins new: the letters of some texts and their most frequent words.

    Args:
        texts: What it is to read, such as the training rows.
        size: How many pieces there are at most; all letters are among them in any case.

    Example:
        >>> tokenizer = collect_vocabulary(["a cat", "a cat sat"], size=13)
        >>> tokenizer.tokens("A cat sat as a cast")
        ['a', 'cat', 's', '##a', '##t', 'a', '##s', 'a', 'c', '##a', '##s', '##t']
    """
    bare = WordPiece({name: number for number, name in enumerate(_SPECIAL)})
    counts = Counter(word for text in texts for word in bare.words(text))
    letters = sorted({letter for word in counts for letter in word})
    pieces = dict.fromkeys((*_SPECIAL, *letters, *(bare.prefix + letter for letter in letters)))
    # Among words that are as frequent, in the order of the alphabet: the same texts give the same numbers.
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        if len(pieces) >= size:
            break
        pieces.setdefault(word)
    return WordPiece({piece: number for number, piece in enumerate(pieces)})


def save_tokenizer(folder: str | Path, tokenizer: WordPiece, *, length: int) -> dict[str, Any]:
    """Write a tokenizer's pieces as `vocab.txt`, one a line; gives what `data.json` beside it is to hold for the rest.

    Args:
        folder: Of a run.
        tokenizer: What its texts are cut by.
        length: Pieces a row at most.
    """
    lines, settings = _lines(tokenizer), {name: getattr(tokenizer, name) for name in _TOKENIZER}
    write_text(Path(folder) / _VOCABULARY, lines)
    return {"length": length, "tokenizer": settings, _DIGEST: _digest(lines)}


def load_tokenizer(folder: str | Path) -> tuple[WordPiece, int]:
    """The tokenizer of a run, and how many pieces a row it was trained with.

    Args:
        folder: Of the run, or the network's folder `model` in it.
    """
    folder = Path(folder).resolve()
    place = folder.parent if folder.name == "model" and not is_file(folder / _VOCABULARY) else folder
    path = place / _DESCRIPTION
    for each in (place / _VOCABULARY, path):
        check_sealed(each)
    tokenizer = WordPiece.load(place / _VOCABULARY)
    expected, fix = "length and tokenizer, as a training run on texts writes them", "copy it again from the run's folder"
    stored = read_json(path, expected=expected, fix=fix)
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="does not say how texts are cut"):
        length, digest = stored["length"], stored.get(_DIGEST)
        if type(length) is not int or not 2 <= length <= _LONGEST:
            raise ValueError(f"length is {length!r}")
        tokenizer = replace(tokenizer, **{name: stored["tokenizer"][name] for name in _TOKENIZER})
    # A line too few would give each later piece the number of another. Runs of before have no digest.
    if digest is not None and digest != _digest(_lines(tokenizer)):
        raise IntegrityError(
            f"the {len(tokenizer)} pieces of {place / _VOCABULARY} are not those that {path} was written with",
            expected="the pieces that the network was trained with, in their order",
            fix="copy both files again from the run's folder",
            path=place / _VOCABULARY,
        )
    return tokenizer, length


def read_text_input(folder: str | Path, text: str | Sequence[str]) -> Tensor:
    """What the network of a run reads in place of a text, or of several: word pieces `(batch, longest)`, int64.

    Args:
        folder: Of a training run on texts, or the network's folder `model` in it.
        text: One text or more; what is longer than the run's texts loses its end.
    """
    tokenizer, length = load_tokenizer(folder)
    ids, lengths = tokenizer.encode([text] if isinstance(text, str) else text, length=length)
    if not len(ids):
        raise OptionError("no text came", expected="at least one", fix="give a text")
    return ids[:, : int(lengths.max())]


def plan_batches(
    lengths: Tensor, batch: int, *, widths: Sequence[int], generator: torch.Generator | None = None
) -> list[Batch]:
    """Batches of rows of similar length, each as wide as one of a few widths: every pair of shapes can be one CUDA graph.

    With a generator the plan is one for training: rows that do not fill a batch are left out, drawn by lot, and rows of one
    width, as well as the batches, come in random order. Without one every row comes once, from short to long; the last batch
    may be smaller.

    Args:
        lengths: Of the rows, `(N,)`.
        batch: Rows a batch.
        widths: The lengths that a batch may have, ascending; the last is at least as long as the longest row.
        generator: Of the order, on the CPU.

    Example:
        >>> [(b.rows.tolist(), b.length) for b in plan_batches(torch.tensor([9, 3, 4, 16, 2]), 2, widths=(4, 8, 16))]
        [([4, 1], 4), ([2, 0], 16), ([3], 16)]
    """
    lengths = lengths.cpu()
    ends = torch.tensor(tuple(widths), dtype=torch.int64)
    if type(batch) is not int or batch < 1 or len(ends) == 0 or int(ends[0]) < 1 or bool((ends.diff() <= 0).any()):
        raise OptionError(
            f"batch is {batch!r} and widths {tuple(widths)}",
            expected="at least one row a batch, and ascending widths from 1 on",
            fix="32 and (16, 32, 64) are a choice",
        )
    if len(lengths) and int(lengths.max()) > int(ends[-1]):
        raise OptionError(
            f"the longest row has {int(lengths.max())} pieces, and the widths are {tuple(widths)}",
            expected="a last width at least as long",
            fix=f"add {int(lengths.max())} to the widths",
        )
    fitting = torch.searchsorted(ends, lengths)
    if generator is None:
        order = lengths.argsort(stable=True)
    else:
        drawn = torch.randperm(len(lengths), generator=generator)[: len(lengths) // batch * batch]
        order = drawn[fitting[drawn].argsort(stable=True)]
    pieces = [order[start : start + batch] for start in range(0, len(order), batch)]
    plan = [Batch(piece, int(ends[fitting[piece].max()])) for piece in pieces]
    if generator is None:
        return plan
    return [plan[at] for at in torch.randperm(len(plan), generator=generator).tolist()]


def _lines(tokenizer: WordPiece) -> str:
    """The pieces in the order of their numbers, one a line."""
    return "".join(f"{piece}\n" for piece in sorted(tokenizer.vocabulary, key=lambda piece: tokenizer.vocabulary[piece]))


def _digest(lines: str) -> str:
    return hashlib.sha256(lines.encode()).hexdigest()


def _folder(root: str | Path | None) -> Path:
    if root is not None:
        return Path(root)
    shared = os.environ.get("ANYTIME_SHARED")
    if shared is None:
        raise OptionError(
            "no folder with texts is known",
            expected="root=FOLDER, or ANYTIME_SHARED in the environment",
            fix="give the folder in which the parquet files lie",
        )
    return Path(shared) / "data" / "text"


def _read(path: Path, names: tuple[str, ...]) -> list[list[Any]]:
    """Columns of a parquet file as lists."""
    try:
        _, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError(
            "texts are stored as parquet, which pyarrow reads, and it is not installed",
            expected="the package pyarrow",
            fix="pip install 'anytime-nn[text]', or pip install pyarrow",
        ) from error
    if not is_file(path):
        raise MissingFileError(
            f"there is no {path}",
            expected="a parquet file with the columns split, text and label",
            fix=f"put {path.name} into {path.parent}, or give its folder as root",
            path=path,
        )
    with parsing(path, expected="a parquet file", fix="copy it again", what="cannot be read"):
        with parquet.ParquetFile(path) as file:
            # A few bytes can stand for any number of equal rows.
            if file.metadata.num_rows > _MOST_ROWS:
                raise _wrong(path, f"{file.metadata.num_rows:,} rows, more than {_MOST_ROWS:,}")
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise _wrong(path, f"no column {', '.join(missing)}")
            table = file.read(columns=list(names), use_threads=False)
        return [table.column(name).to_pylist() for name in names]


def _splits(name: str, splits: list[Any], texts: list[Any], labels: list[Any], *, path: Path) -> dict[str, TextData]:
    if not all(isinstance(split, str) for split in splits) or not all(isinstance(text, str) for text in texts):
        raise _wrong(path, "splits or texts that are no text")
    # The rows of SST-2 that are held out are called dev there.
    splits = ["val" if split == "dev" else split for split in splits]
    seen = {label for split, label in zip(splits, labels, strict=True) if split == "train"}
    if seen == {0, 1}:
        numbers: Mapping[Any, int] = {0: 0, 1: 1}
        class_names = _SENTIMENTS
    elif seen and all(isinstance(label, str) for label in seen):
        class_names = tuple(sorted(seen))
        numbers = {label: number for number, label in enumerate(class_names)}
    else:
        raise _wrong(path, f"training rows with the labels {sorted(seen, key=str)[:5]}")
    if "test" not in splits:
        raise _wrong(path, "no row of the split test")
    found: dict[str, TextData] = {}
    for split in dict.fromkeys(splits):
        part = [(text, label) for text, label, at in zip(texts, labels, splits, strict=True) if at == split]
        outside = split.startswith("oos_")
        known: Mapping[Any, int] = {_OUT_OF_SCOPE: 0} if outside else numbers
        strange = next((label for _, label in part if label not in known), None)
        if strange is not None:
            raise _wrong(path, f"the label {strange!r} in the split {split}, which no training row has")
        found[split] = TextData(
            name=name,
            split=split,
            texts=tuple(text for text, _ in part),
            labels=torch.tensor([known[label] for _, label in part]),
            class_names=(_OUT_OF_SCOPE,) if outside else class_names,
            rows=torch.arange(len(part)),
        )
    return found


def _without_repeats(splits: Mapping[str, TextData]) -> dict[str, TextData]:
    seen: set[str] = set()
    kept = dict(splits)
    for split in _PRECEDENCE:
        if split not in splits:
            continue
        data = splits[split]
        first = {text: at for at, text in reversed(list(enumerate(data.texts))) if text not in seen}
        seen.update(data.texts)
        if split != "test":
            kept[split] = data.take(torch.tensor(sorted(first.values()), dtype=torch.int64))
    return kept


def _check_rows(rows: Tensor, count: int) -> None:
    if rows.shape != (count,):
        raise ShapeError(
            f"rows have shape {tuple(rows.shape)} for {count} texts",
            expected=f"({count},)",
            fix="give torch.arange(len(texts)) for a set that is whole",
        )


def _wrong(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path} holds {found}",
        expected="the columns split, text and label, with training and test rows",
        fix="copy the published file again",
        path=path,
    )
