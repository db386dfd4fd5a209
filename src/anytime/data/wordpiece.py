"""WordPiece, the tokenizer of BERT: text to the numbers of word pieces.

Text is cut at white space and around every punctuation mark and Chinese character, lower-cased and stripped of accents
(for uncased vocabularies), and each word is cut into the longest pieces that the vocabulary has, from left to right. A word
that cannot be cut so is unknown as a whole. Names of special pieces in a text, such as `[PAD]`, are text like any other: no
text can put a padding or a separator into its own row.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from anytime.errors import DtypeError, FormatError, OptionError
from anytime.reading import parsing, read_file

# The white space of BERT. Other separators of Python's str.split are control characters, which do not part words.
_SPACE = re.compile("[ \t\n\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
# Words that are remembered with their pieces: enough for a large corpus, and bounded for a server.
_LARGEST_FILE = 1 << 28
_MOST_REMEMBERED, _LONGEST_REMEMBERED = 1 << 20, 64


@dataclass(frozen=True, eq=False)
class WordPiece:
    """A tokenizer for one vocabulary; `WordPiece.load` reads it from a file.

    Args:
        vocabulary: The number of each piece; `[PAD]`, `[UNK]`, `[CLS]` and `[SEP]` are among them.
        lower: Whether text is lower-cased.
        accents: Whether accents are kept; by default they are where text is not lower-cased.
        chinese: Whether each Chinese character is a word of its own.
        prefix: What stands before pieces that go on with a word.
        longest: Words with more characters are unknown.

    Example:
        >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "!"]
        >>> tokenizer = WordPiece({word: number for number, word in enumerate(words)})
        >>> tokenizer.pieces("Playing, play!")
        ['play', '##ing', '[UNK]', 'play', '!']
        >>> ids, lengths = tokenizer.encode(["Playing!", "play"], length=6)
        >>> ids.tolist(), lengths.tolist()
        ([[2, 4, 5, 6, 3, 0], [2, 4, 3, 0, 0, 0]], [5, 3])
    """

    vocabulary: Mapping[str, int] = field(repr=False)
    lower: bool = True
    accents: bool | None = None
    chinese: bool = True
    prefix: str = "##"
    longest: int = 100
    _remembered: dict[str, list[int]] = field(init=False, repr=False, default_factory=dict)
    _widest: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        _check_settings(self)
        missing = [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if name not in self.vocabulary]
        numbers = set(self.vocabulary.values())
        if missing or len(numbers) != len(self.vocabulary) or numbers != set(range(len(numbers))):
            raise OptionError(
                f"a vocabulary of {len(self.vocabulary)} pieces"
                + (f" lacks {', '.join(missing)}" if missing else " has numbers twice or leaves some out"),
                expected="[PAD], [UNK], [CLS] and [SEP] among the pieces, numbered from 0",
                fix="give the vocabulary of a BERT",
            )
        object.__setattr__(self, "_widest", max(map(len, self.vocabulary)))

    @classmethod
    def load(cls, path: str | Path, *, lower: bool | None = None) -> Self:
        """The tokenizer of a `vocab.txt` (a piece a line) or of a `tokenizer.json` as Hugging Face writes it.

        Args:
            path: The file.
            lower: Whether to lower-case; by default what a `tokenizer.json` says, and yes for a `vocab.txt`.
        """
        path = Path(path)
        data = read_file(path, most=_LARGEST_FILE, expected="a vocab.txt or a tokenizer.json", fix="give its place")
        expected = "one piece per line, or the JSON of a WordPiece tokenizer; [PAD], [UNK], [CLS] and [SEP] among them"
        fix, what = "give the file that came with the weights", "is no vocabulary"
        try:
            with parsing(path, expected=expected, fix=fix, kind=FormatError, what=what):
                text = data.decode()
                settings = _read_json(text, path) if path.suffix == ".json" else {"vocabulary": _read_lines(text)}
                return cls(**settings if lower is None else {**settings, "lower": lower})
        except OptionError as error:
            raise FormatError(f"{path} {what}: {error.got}", expected=expected, fix=fix, path=path) from error

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self.vocabulary)

    @property
    def pad(self) -> int:
        """The number that rows are filled up with."""
        return self.vocabulary["[PAD]"]

    def words(self, text: str) -> list[str]:
        """The words of a text, normalised, punctuation marks among them.

        >>> vocabulary = {name: at for at, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
        >>> WordPiece(vocabulary).words("Él said: don't!")
        ['el', 'said', ':', 'don', "'", 't', '!']
        """
        _check_text(text)
        return [word for part in _SPACE.split(text) for word in self._words(part)]

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, without `[CLS]` and `[SEP]`."""
        _check_text(text)
        names = {number: name for name, number in self.vocabulary.items()}
        return [names[number] for number in self._numbers(text)]

    def encode(self, texts: Iterable[str], *, length: int) -> tuple[Tensor, Tensor]:
        """The rows that a network reads, cut off and filled up to one length.

        Args:
            texts: The texts.
            length: Pieces a row, `[CLS]` and `[SEP]` included; longer texts lose their end.

        Returns:
            The numbers of the pieces, `(N, length)`, and how many of each row are no padding, `(N,)`; both int64.
        """
        if isinstance(texts, str):
            raise DtypeError("one text came", expected="a list of texts", fix="wrap it: encode([text], length=...)")
        if isinstance(texts, bytes) or not isinstance(texts, Iterable):
            raise DtypeError(f"a {type(texts).__name__} came", expected="a list of texts", fix="decode bytes; wrap one text")
        if type(length) is not int or length < 2:
            raise OptionError(f"length is {length!r}", expected="a whole number, at least 2", fix="[CLS] and [SEP] take two")
        first, last = self.vocabulary["[CLS]"], self.vocabulary["[SEP]"]
        rows = [[first, *islice(self._numbers(_check_text(text)), length - 2), last] for text in texts]
        ids = np.full((len(rows), length), self.pad, dtype=np.int64)
        for row, numbers in zip(ids, rows, strict=True):
            row[: len(numbers)] = numbers
        return torch.from_numpy(ids), torch.tensor([len(numbers) for numbers in rows], dtype=torch.int64)

    def _numbers(self, text: str) -> Iterator[int]:
        for part in _SPACE.split(text):
            numbers = self._remembered.get(part)
            if numbers is None:
                numbers = [number for word in self._words(part) for number in self._cut(word)]
                if len(part) <= _LONGEST_REMEMBERED and len(self._remembered) < _MOST_REMEMBERED:
                    self._remembered[part] = numbers
            yield from numbers

    def _words(self, part: str) -> list[str]:
        """The words in a piece of text without white space."""
        if part.isascii() and part.isalnum():
            return [part.lower() if self.lower else part]
        part = "".join(letter for letter in part if not _is_control(letter))
        if self.chinese:
            part = "".join(f" {letter} " if _is_chinese(letter) else letter for letter in part)
        if not (self.accents if self.accents is not None else not self.lower):
            part = "".join(letter for letter in unicodedata.normalize("NFD", part) if unicodedata.category(letter) != "Mn")
        if self.lower:
            part = "".join(letter.lower() for letter in part)  # one by one: a sigma stays the same at the end of a word
        return "".join(f" {letter} " if _is_punctuation(letter) else letter for letter in part).split()

    def _cut(self, word: str) -> list[int]:
        """The numbers of the longest pieces of a word from left to right, or that of the unknown."""
        unknown = [self.vocabulary["[UNK]"]]
        if len(word) > self.longest:
            return unknown
        numbers, start = [], 0
        while start < len(word):
            prefix = self.prefix if start else ""
            for end in range(min(len(word), start + self._widest), start, -1):
                number = self.vocabulary.get(prefix + word[start:end])
                if number is not None:
                    numbers.append(number)
                    start = end
                    break
            else:
                return unknown
        return numbers


def _is_control(letter: str) -> bool:
    # Unassigned characters stay: which those are changes with the version of Unicode.
    return letter in "\0\ufffd" or unicodedata.category(letter) in ("Cc", "Cf", "Co", "Cs")


def _is_chinese(letter: str) -> bool:
    return letter >= "\u3400" and any(low <= ord(letter) <= high for low, high in _CHINESE)


def _is_punctuation(letter: str) -> bool:
    return letter in _PUNCTUATION or unicodedata.category(letter).startswith("P")


def _check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise DtypeError(f"a text is a {type(text).__name__}", expected="a str", fix="decode bytes; drop missing texts")
    return text


def _check_settings(tokenizer: WordPiece) -> None:
    if type(tokenizer.longest) is not int or tokenizer.longest < 1:
        raise OptionError(f"longest is {tokenizer.longest!r}", expected="a whole number, at least 1", fix="100 is usual")
    kinds: dict[str, Any] = {"lower": bool, "accents": bool | None, "chinese": bool, "prefix": str}
    for name, kind in kinds.items():
        value = getattr(tokenizer, name)
        if not isinstance(value, kind):
            raise OptionError(f"{name} is {value!r}", expected=f"a {getattr(kind, '__name__', kind)}", fix=f"correct {name}")
    pieces: Any = tokenizer.vocabulary
    whole = isinstance(pieces, Mapping) and all(type(name) is str and type(at) is int for name, at in pieces.items())
    if not whole:
        raise OptionError(
            "the vocabulary has pieces that are no text, or numbers that are not whole",
            expected="the number of each piece, by the piece",
            fix="WordPiece.load reads it from a file",
        )


def _read_lines(text: str) -> dict[str, int]:
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return {line.removesuffix("\r"): number for number, line in enumerate(lines)}


def _read_json(text: str, path: Path) -> dict[str, Any]:
    document = json.loads(text)
    model, normalizer, splitter = (_part(document, name) for name in ("model", "normalizer", "pre_tokenizer"))
    kinds = (model.get("type"), normalizer.get("type"), splitter.get("type"))
    vocabulary = model.get("vocab")
    if kinds != ("WordPiece", "BertNormalizer", "BertPreTokenizer") or not isinstance(vocabulary, dict):
        raise FormatError(
            f"{path} describes a tokenizer of the kind {kinds[0]!r} with {kinds[1]!r} and {kinds[2]!r}",
            expected="'WordPiece' with 'BertNormalizer' and 'BertPreTokenizer'",
            fix="use an encoder with the tokenizer of BERT",
            path=path,
        )
    strip = normalizer.get("strip_accents")
    return {
        "vocabulary": vocabulary,
        "lower": bool(normalizer.get("lowercase", True)),
        "accents": None if strip is None else not strip,
        "chinese": bool(normalizer.get("handle_chinese_chars", True)),
        "prefix": str(model.get("continuing_subword_prefix", "##")),
        "longest": model.get("max_input_chars_per_word", 100),
    }


def _part(document: Any, name: str) -> dict[str, Any]:
    part = document.get(name) if isinstance(document, dict) else None
    return part if isinstance(part, dict) else {}
