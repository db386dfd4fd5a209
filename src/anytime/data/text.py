"""Labelled texts: six published data sets, and the token ids that networks read.

Each data set is one parquet file with the columns `split`, `text` and `label`; `DATA_SETS` lists them. `tokenize` turns
`TextData` into `TokenData`. A training run stores its tokenizer (`save_tokenizer`), so that `read_text_input` can encode any
other text for its network.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from anytime.artifacts import check_sealed, write_text
from anytime.checks import LARGEST_OLD_SEED, check_count, check_seed
from anytime.data.base import LabelledRows
from anytime.data.wordpiece import SPECIAL_TOKENS, WordPiece
from anytime.errors import DtypeError, FormatError, IntegrityError, MissingExtraError, MissingFileError, OptionError, ShapeError
from anytime.reading import is_file, parsing, read_json

TextName = Literal["imdb", "sst2", "agnews", "trec", "banking77", "clinc150"]

_SENTIMENTS = ("negative", "positive")
_OUT_OF_SCOPE = "oos"


class DataSet(NamedTuple):
    """A published data set.

    Attributes:
        class_names: The names of the labels 0, 1, …; by default the labels are names themselves, and sorted.
        fine: The column with finer classes, if there is one.
    """

    class_names: tuple[str, ...] = ()
    fine: str = ""


DATA_SETS: Mapping[str, DataSet] = {
    "imdb": DataSet(_SENTIMENTS),  # 2 classes; 25,000 train, 25,000 test, of which 123 texts are in both
    "sst2": DataSet(_SENTIMENTS),  # 2 classes; 60,614 train, 6,735 val, 872 test
    "agnews": DataSet(("world", "sports", "business", "science")),  # 4 classes; 5,600 train, 2,000 test: tools/ag_news.py
    "trec": DataSet(fine="fine"),  # 6 classes or 50 fine ones; 5,452 train, 500 test
    "banking77": DataSet(),  # 77 classes; 10,003 train, 3,080 test
    "clinc150": DataSet(),  # 150 classes; 15,000 train, 3,000 val, 4,500 test, 100 oos_train, 100 oos_val, 1,000 oos_test
}
VOCABULARY, _DESCRIPTION, _DIGEST = "vocab.txt", "data.json", "vocabulary_sha256"
_MOST_ROWS, _LONGEST = 10**7, 1 << 16
_SETTINGS = ("lower", "accents", "chinese", "prefix", "longest")


@dataclass(frozen=True, eq=False)
class TextData(LabelledRows):
    """Labelled texts of one split; out-of-scope queries are splits such as `oos_test`."""

    name: str
    split: str
    texts: tuple[str, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    rows: Tensor
    per_row = ("texts", "labels", "rows")

    def __post_init__(self) -> None:
        self._check(len(self.texts))


@dataclass(frozen=True, eq=False)
class TokenData(LabelledRows):
    """Labelled texts of one split as token ids; the attributes of `LabelledRows`, and these.

    Attributes:
        ids: `(N, length)`, int64: the token ids.
        lengths: `(N,)`, int64: the number of tokens before the padding.
        pad: The id of the padding token.
    """

    name: str
    split: str
    ids: Tensor
    lengths: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    rows: Tensor
    pad: int = 0
    per_row = ("ids", "lengths", "labels", "rows")

    def __post_init__(self) -> None:
        fix = "encode the texts with WordPiece.encode"
        if self.ids.dtype != torch.int64:
            raise DtypeError(f"token ids of {self.name} have dtype {self.ids.dtype}", expected="int64", fix="use ids.long()")
        if self.ids.ndim != 2 or self.lengths.shape != self.ids.shape[:1]:
            got = f"ids of {self.name} have shape {tuple(self.ids.shape)}, lengths {tuple(self.lengths.shape)}"
            raise ShapeError(got, expected="(N, length) and (N,)", fix=fix)
        if len(self) and not 1 <= int(self.lengths.min()) <= int(self.lengths.max()) <= self.length:
            got = f"lengths of {self.name} range from {int(self.lengths.min())} to {int(self.lengths.max())}"
            raise ShapeError(got, expected=f"lengths from 1 to {self.length}, the length of the rows", fix=fix)
        self._check(len(self.ids))

    @property
    def length(self) -> int:
        """Tokens per row, padding included."""
        return self.ids.shape[1]


Texts = TypeVar("Texts", TextData, TokenData)


def load_text(
    name: TextName, root: str | Path | None = None, *, fine: bool = False, distinct: bool = False
) -> dict[str, TextData]:
    """Load the splits of a published data set; `train` and `test` are always among them.

    Out-of-scope queries of CLINC150 are splits with a single class, `oos`.

    Args:
        name: `imdb`, `sst2`, `agnews`, `trec`, `banking77` or `clinc150`.
        root: The folder with the parquet files; by default `data/text` in the folder in the environment variable
            `ANYTIME_SHARED`.
        fine: Whether to use the 50 fine classes of TREC.
        distinct: Whether to remove duplicates: training texts that are in the validation or test split, validation texts that
            are in the test split, and repeated texts in both. The test split is not changed.
    """
    known = ", ".join(DATA_SETS)
    if name not in DATA_SETS:
        raise OptionError(f"name is {name!r}", expected=f"one of {known}", fix="pass one of those names")
    if fine and not DATA_SETS[name].fine:
        raise OptionError(f"fine=True with {name!r}", expected="fine=True with 'trec' only", fix="remove fine=True")
    path = _folder(root) / f"{name}.parquet"
    columns = _read_columns(path, ("split", "text", DATA_SETS[name].fine if fine else "label"))
    splits = _splits(name, *columns, path=path)
    return _without_duplicates(splits) if distinct else splits


def draw_classes(classes: int, count: int, *, seed: int = 0) -> tuple[int, ...]:
    """Draw a random sample of classes, in ascending order; with one seed, smaller samples are subsets of larger ones.

    >>> draw_classes(150, 3), draw_classes(150, 4)
    ((33, 62, 114), (33, 62, 107, 114))
    """
    check_count(count, "count", most=classes)
    # NumPy keeps the stream of RandomState across versions, that of a Generator not.
    order = np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED)).permutation(classes)
    return tuple(sorted(order[:count].tolist()))


def take_classes(data: Texts, classes: Sequence[int]) -> Texts:
    """Select the rows of some classes and relabel them 0, 1, … in the given order.

    Args:
        data: Texts or token ids.
        classes: Class indices of `data`, for example from `draw_classes`.
    """
    chosen = list(classes)
    if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= label < data.classes for label in chosen):
        raise OptionError(
            f"classes is {chosen}",
            expected=f"distinct classes from 0 to {data.classes - 1}",
            fix=f"use draw_classes({data.classes}, count)",
        )
    new_labels = torch.full((data.classes,), -1, device=data.labels.device)
    new_labels[chosen] = torch.arange(len(chosen), device=new_labels.device)
    labels = new_labels[data.labels]
    index = (labels >= 0).nonzero()[:, 0]
    # Labels and names change together: the checks would refuse one without the other.
    return replace(data.take(index), labels=labels[index], class_names=tuple(data.class_names[label] for label in chosen))


def tokenize(data: TextData, tokenizer: WordPiece, *, length: int) -> TokenData:
    """Encode texts as token ids; longer texts are truncated to `length` tokens, `[CLS]` and `[SEP]` included."""
    ids, lengths = tokenizer.encode(data.texts, length=length)
    return TokenData(data.name, data.split, ids, lengths, data.labels, data.class_names, data.rows, tokenizer.pad)


def collect_vocabulary(texts: Iterable[str], *, size: int) -> WordPiece:
    """Build a vocabulary from texts, for an encoder that is trained from scratch: all characters and the most frequent words.

    Args:
        texts: For example the training texts.
        size: The largest number of tokens; all characters are included even if they are more.

    Example:
        >>> tokenizer = collect_vocabulary(["a cat", "a cat sat"], size=13)
        >>> tokenizer.tokens("A cat sat as a cast")
        ['a', 'cat', 's', '##a', '##t', 'a', '##s', 'a', 'c', '##a', '##s', '##t']
    """
    bare = WordPiece({name: number for number, name in enumerate(SPECIAL_TOKENS)})
    counts = Counter(word for text in texts for word in bare.words(text))
    letters = sorted({letter for word in counts for letter in word})
    tokens = dict.fromkeys((*SPECIAL_TOKENS, *letters, *(bare.prefix + letter for letter in letters)))
    # Equally frequent words in alphabetical order: the same texts give the same ids.
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        if len(tokens) >= size:
            break
        tokens.setdefault(word)
    return WordPiece({token: number for number, token in enumerate(tokens)})


def save_tokenizer(folder: str | Path, tokenizer: WordPiece, *, length: int) -> dict[str, Any]:
    """Write the vocabulary to `vocab.txt`, one token per line.

    Returns:
        The settings to store in `data.json` in the same folder: `length`, the tokens per row, and those of the tokenizer.
    """
    lines, settings = describe_tokenizer(tokenizer, length=length)
    write_text(Path(folder) / VOCABULARY, lines)
    return settings


def describe_tokenizer(tokenizer: WordPiece, *, length: int) -> tuple[str, dict[str, Any]]:
    """The content of `vocab.txt`, and the settings to store in `data.json`; see `save_tokenizer`."""
    lines = _lines(tokenizer)
    settings = {name: getattr(tokenizer, name) for name in _SETTINGS}
    return lines, {"length": length, "tokenizer": settings, _DIGEST: _digest(lines)}


def load_tokenizer(folder: str | Path) -> tuple[WordPiece, int]:
    """Load the tokenizer of a training run, and the tokens per row of its training.

    Args:
        folder: The folder of the run, or the folder `model` in it.
    """
    folder = Path(folder).resolve()
    place = folder.parent if folder.name == "model" and not is_file(folder / VOCABULARY) else folder
    path = place / _DESCRIPTION
    for each in (place / VOCABULARY, path):
        check_sealed(each)
    tokenizer = WordPiece.load(place / VOCABULARY)
    expected, fix = "the length and the tokenizer settings of a training run on texts", "copy it from the run's folder again"
    stored = read_json(path, expected=expected, fix=fix)
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="does not describe a tokenizer"):
        length, digest = stored["length"], stored.get(_DIGEST)
        if type(length) is not int or not 2 <= length <= _LONGEST:
            raise ValueError(f"length is {length!r}")
        tokenizer = replace(tokenizer, **{name: stored["tokenizer"][name] for name in _SETTINGS})
    # A missing line would change the ids of all later tokens. Runs of older versions have no digest.
    if digest is not None and digest != _digest(_lines(tokenizer)):
        raise IntegrityError(
            f"the {len(tokenizer)} tokens of {place / VOCABULARY} are not those that {path} was written for",
            expected="the vocabulary that the network was trained with",
            fix="copy both files from the run's folder again",
            path=place / VOCABULARY,
        )
    return tokenizer, length


def read_text_input(folder: str | Path, text: str | Sequence[str]) -> Tensor:
    """Encode one or more texts for the network of a training run: token ids `(batch, longest)`, int64.

    Args:
        folder: The folder of a training run on texts, or the folder `model` in it.
        text: One or more texts; they are truncated to the length of the training texts.
    """
    tokenizer, length = load_tokenizer(folder)
    ids, lengths = tokenizer.encode([text] if isinstance(text, str) else text, length=length)
    if not len(ids):
        raise OptionError("text is an empty list", expected="at least one text", fix="pass a text or a list of texts")
    return ids[:, : int(lengths.max())]


def _lines(tokenizer: WordPiece) -> str:
    """The tokens in the order of their ids, one per line."""
    return "".join(f"{token}\n" for token in sorted(tokenizer.vocabulary, key=tokenizer.vocabulary.__getitem__))


def _digest(lines: str) -> str:
    return hashlib.sha256(lines.encode()).hexdigest()


def _folder(root: str | Path | None) -> Path:
    if root is not None:
        return Path(root)
    shared = os.environ.get("ANYTIME_SHARED")
    if shared is None:
        raise OptionError(
            "root is not set",
            expected="root=FOLDER, or ANYTIME_SHARED in the environment",
            fix="pass the folder with the parquet files as root",
        )
    return Path(shared) / "data" / "text"


def _read_columns(path: Path, names: tuple[str, ...]) -> list[list[Any]]:
    try:
        _, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError(
            "the package pyarrow, which reads parquet files, is not installed",
            expected="pyarrow",
            fix="pip install 'anytime-nn[text]'",
        ) from error
    if not is_file(path):
        raise MissingFileError(
            f"there is no file {path}",
            expected="a parquet file with the columns split, text and label",
            fix=f"put {path.name} into {path.parent}, or pass its folder as root",
            path=path,
        )
    with parsing(path, expected="a parquet file", fix="copy the published file again", what="cannot be read"):
        with parquet.ParquetFile(path) as file:
            # A few bytes can encode any number of equal rows.
            if file.metadata.num_rows > _MOST_ROWS:
                raise _wrong(path, f"{file.metadata.num_rows:,} rows, more than {_MOST_ROWS:,}")
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                raise _wrong(path, f"no column {', '.join(missing)}")
            table = file.read(columns=list(names), use_threads=False)
        return [table.column(name).to_pylist() for name in names]


def _splits(name: str, splits: list[Any], texts: list[Any], labels: list[Any], *, path: Path) -> dict[str, TextData]:
    if not all(isinstance(value, str) for value in (*splits, *texts)):
        raise _wrong(path, "splits or texts that are not strings")
    splits = ["val" if split == "dev" else split for split in splits]  # SST-2 calls it dev
    seen = {label for split, label in zip(splits, labels, strict=True) if split == "train"}
    class_names = DATA_SETS[name].class_names
    stored: Sequence[Any] = range(len(class_names))
    if not class_names and all(isinstance(label, str) for label in seen):
        stored = class_names = tuple(sorted(seen))
    if not seen or seen != set(stored):
        raise _wrong(path, f"training rows with the labels {sorted(seen, key=str)[:5]}")
    if "test" not in splits:
        raise _wrong(path, "no test rows")
    found: dict[str, TextData] = {}
    for split in dict.fromkeys(splits):
        part = [(text, label) for text, label, at in zip(texts, labels, splits, strict=True) if at == split]
        outside = split.startswith("oos_")
        known = {label: number for number, label in enumerate((_OUT_OF_SCOPE,) if outside else stored)}
        unknown = next((label for _, label in part if label not in known), None)
        if unknown is not None:
            raise _wrong(path, f"the label {unknown!r} in the split {split}, which no training row has")
        found[split] = TextData(
            name=name,
            split=split,
            texts=tuple(text for text, _ in part),
            labels=torch.tensor([known[label] for _, label in part]),
            class_names=(_OUT_OF_SCOPE,) if outside else class_names,
            rows=torch.arange(len(part)),
        )
    return found


def _without_duplicates(splits: Mapping[str, TextData]) -> dict[str, TextData]:
    seen: set[str] = set()
    kept = dict(splits)
    for split in ("test", "val", "train"):
        if split not in splits:
            continue
        data = splits[split]
        first = {text: at for at, text in reversed(list(enumerate(data.texts))) if text not in seen}
        seen.update(data.texts)
        if split != "test":
            kept[split] = data.take(torch.tensor(sorted(first.values()), dtype=torch.int64))
    return kept


def _wrong(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path} contains {found}",
        expected="the columns split, text and label, with training and test rows",
        fix="copy the published file again",
        path=path,
    )
