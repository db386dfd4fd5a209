"""`anytime.load` knows every kind of fitted object in the package."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

import anytime
from anytime import calibrate, conformal, policy, run
from anytime.errors import FormatError, IntegrityError, MissingFileError
from anytime.fitted import KINDS, Fitted

FILE = anytime.samples.cifar100_msdnet()
LOGITS, LABELS = FILE.logits[:, :120].float(), FILE.labels[:120]  # type: ignore[index]


@dataclass(frozen=True)
class Stranger(Fitted, kind="stranger"):
    """Of these tests, not of the package."""


def kinds_in_the_source() -> set[str]:
    """What stands as `kind=` in a class statement, in modules that nobody has imported too."""
    found = set()
    for path in Path(anytime.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found |= {ast.literal_eval(word.value) for word in node.keywords if word.arg == "kind"}
    return found


def features() -> tuple[list[torch.Tensor], torch.Tensor, list[torch.nn.Linear]]:
    torch.manual_seed(0)
    return list(torch.randn(2, 40, 3)), torch.arange(40) % 4, [torch.nn.Linear(3, 4) for _ in range(2)]


def profile() -> run.Profile:
    times = torch.rand(1, 3, 4)
    return run.Profile(3, 5, "torch", 1, {"system": "here"}, (1,), times, times.cumsum(1), 10)


def examples() -> list[Fitted]:
    answers = anytime.Product()(LOGITS).log_probs
    frontier = calibrate.tune(LOGITS, LABELS, penalties=(3.0,))
    return [
        calibrate.fit_temperature(LOGITS, LABELS),
        calibrate.fit_product(LOGITS, LABELS, steps=3),
        calibrate.fit_adaptive_threshold(LOGITS[:, :60], LABELS[:60], tuning_logits=LOGITS[:, 60:], tuning_labels=LABELS[60:]),
        calibrate.FittedRule.of(calibrate.fit_geometric(LOGITS, LABELS, epochs=1), exits=7, classes=100),
        calibrate.certify(LOGITS, LABELS),
        calibrate.certify_choice(LOGITS, LABELS, ["product", "latest"]),
        calibrate.fit_laplace(*features()),
        frontier,
        frontier.choose(least="nll"),
        conformal.fit_conformal_sets(LOGITS, LABELS),
        conformal.fit_nested_sets(LOGITS, LABELS),
        conformal.fit_nested_intervals(features()[0], torch.randn(40)),
        policy.fit_budget_policy(answers, costs=range(1, 8), budget=3.0),
        policy.fit_risk_control(answers, loss="consistency", epsilon=0.2),
        policy.PlainPolicy.of(policy.Confidence((0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 1.5)), exits=7),
        policy.fit_window_policy(answers, aim="coverage", level=0.5, skip=5),
        profile(),
    ]


def test_every_kind_of_the_package_is_in_the_table() -> None:
    assert set(KINDS) == kinds_in_the_source()
    for kind, home in KINDS.items():
        package, _, name = home.rpartition(".")
        assert getattr(importlib.import_module(package), name).kind == kind


def test_one_of_every_kind_is_read_back_as_it_was(tmp_path: Path) -> None:
    made = examples()
    assert {each.kind for each in made} == set(KINDS)
    for each in made:
        again = anytime.load(each.save(tmp_path / f"{each.kind}.json"))
        assert type(again) is type(each)
        assert again.document() == each.document()
        assert [field.name for field in fields(again)] == [field.name for field in fields(each)]


def test_an_unknown_kind_names_the_known_ones(tmp_path: Path) -> None:
    path = Stranger(2, 3).save(tmp_path / "stranger.json")
    with pytest.raises(FormatError, match="stranger") as error:
        anytime.load(path)
    assert all(kind in error.value.expected for kind in KINDS)


def test_a_damaged_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = calibrate.certify(LOGITS, LABELS).save(tmp_path / "certificate.json")
    path.write_text(path.read_text().replace('"rows": 120', '"rows": 1200'))
    with pytest.raises(IntegrityError, match="checksum"):
        anytime.load(path)
    with pytest.raises(MissingFileError):
        anytime.load(tmp_path / "nowhere.json")


def test_the_documented_table_of_kinds_is_complete() -> None:
    page = Path(anytime.__file__).parents[2] / "docs" / "calibration.md"
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (\d(?: \(\d\))?) \| `", page.read_text(), re.MULTILINE))
    wanted = {}
    for kind, home in KINDS.items():
        package, _, name = home.rpartition(".")
        known = getattr(importlib.import_module(package), name)
        wanted[kind] = f"{known.version}" + ("" if known.oldest == known.version else f" ({known.oldest})")
    assert rows == wanted
