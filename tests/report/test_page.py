from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from anytime.combine import parse_rule
from anytime.evaluation import Evaluation
from anytime.evaluation.figures import figures
from anytime.report import render
from anytime.report.pages.page import as_json, flat

Make = Callable[..., Evaluation]
EVIL = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "link", "input", "br", "wbr", "img"}


class Page(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def shown(evaluation: Evaluation, *, title: str = "A model", source: str = "logits.npz") -> str:
    return render(evaluation, title=title, source=source, versions={"torch": "2.0"})


@pytest.fixture(scope="module")
def page(plain: Evaluation) -> str:
    return shown(plain)


def test_the_page_is_small_and_well_formed(page: str) -> None:
    assert len(page.encode()) < 400_000
    assert page.lstrip().startswith("<!DOCTYPE html>")
    Page(page)


def test_six_rules_and_twelve_exits_stay_under_three_megabytes(make: Make) -> None:
    rules = ("latest", "caching", "product", "mixture", "product(softplus)", "product(clipped(2), weights=ones)")
    assert len(shown(make(exits=12, samples=250, classes=20, rules=rules)).encode()) < 1_000_000


def test_the_page_loads_nothing_else(page: str) -> None:
    found = Page(page)
    for tag, attrs in found.elements:
        assert "src" not in attrs, tag
        assert (attrs.get("href") or "#").startswith(("#", "data:,")), tag
    assert not re.search(r"https?:|url\(|@import|@font-face", page)
    policy = next(attrs["content"] for attrs in found.all("meta") if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_the_same_input_gives_the_same_bytes(plain: Evaluation, page: str) -> None:
    assert shown(plain) == page


def test_the_policy_allows_exactly_the_scripts_of_the_page(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(hashes) == 2
    assert re.findall(r"'sha256-([^']+)'", unescape(page)) == hashes
    assert not re.search(r"\son\w+=", page)


def test_external_names_are_escaped_everywhere(make: Make) -> None:
    rules = {"latest": parse_rule("latest"), EVIL: parse_rule("caching"), f"product{EVIL}": parse_rule("product")}
    clean = shown(make(rules={"latest": parse_rule("latest"), "one": parse_rule("caching"), "two": parse_rule("product")}))
    found = make(rules=rules)
    text = shown(replace(found, settings={**found.settings, EVIL: EVIL}), title=EVIL, source=EVIL)
    assert EVIL not in text
    assert "<img" not in text
    kinds = Counter(tag for tag, _ in Page(text).elements)
    expected = Counter(tag for tag, _ in Page(clean).elements)
    for tag in ("script", "img", "svg", "table", "h2"):
        assert kinds[tag] == expected[tag], tag
    assert EVIL in " ".join(Page(text).words)


def test_the_data_of_the_slider_survives_any_name(make: Make) -> None:
    text = shown(make(rules={"latest": parse_rule("latest"), EVIL: parse_rule("product")}))
    block = re.search(r'<script type="application/json" id="inputs-data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    assert json.loads(block[1])["rules"] == ["Latest", EVIL]
    assert "<" not in as_json({EVIL: "<!--"})


def test_every_number_of_every_figure_is_on_the_page(plain: Evaluation, page: str) -> None:
    text = Page(page).text
    for figure in figures(plain):
        for row in figure.table.rows:
            assert "".join(row).replace(" ", "") in text.replace(" ", "")


def test_figures_and_tables_have_text_for_screen_readers(page: str) -> None:
    found = Page(page)
    pictures = [attrs for attrs in found.all("svg") if attrs.get("aria-hidden") != "true"]
    assert pictures
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in pictures)
    assert len(found.all("table")) == len(found.all("caption"))
    assert all(attrs.get("scope") in ("row", "col") for attrs in found.all("th"))
    assert found.all("html") == [{"lang": "en"}]
    labels = {attrs["for"] for attrs in found.all("label")}
    assert labels == {"group", "other-rule"}


def test_headings_do_not_skip_and_ids_are_unique(page: str) -> None:
    found = Page(page)
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert {(attrs["href"] or "")[1:] for attrs in found.all("a")} <= set(ids)


def test_the_sections_are_in_order(page: str) -> None:
    order = ["verdict", "card", "average", "inputs", "drops", "uncertainty", "calibration", "learning", "support"]
    order += ["worst", "numbers", "measured"]
    assert re.findall(r'<section id="(\w+)"', page) == order


def test_without_labels_accuracy_is_not_mentioned(make: Make) -> None:
    text = shown(make(labelled=False))
    found = Page(text)
    assert 'id="average"' not in text
    assert 'id="calibration"' not in text
    assert "figure-accuracy" not in text
    assert "final answer" in found.text
    assert "Agreement with the final answer" in found.text
    assert "orgotten" not in "".join(re.findall(r"<h[23]>.*?</h", text))


def test_one_rule_has_no_choice_and_two_exits_are_enough(make: Make) -> None:
    text = shown(make(exits=2, rules=("latest",)))
    assert "<select" not in text
    Page(text)


def test_few_inputs_have_no_slider(make: Make) -> None:
    text = shown(make(samples=8, sets=None))
    assert 'type="range"' not in text
    Page(text)


def test_the_page_lists_the_settings(page: str) -> None:
    text = Page(page).text
    assert "file logits.npz" in text
    assert "seed 0" in text
    assert "version of torch 2.0" in text
    assert "How grades and headline are decided" in text


def test_nested_settings_are_flattened() -> None:
    settings = {"seed": 1, "strict": True, "sets": {"alpha": 0.05, "split": None}, "rules": ["a", "b"], "empty": []}
    assert list(flat(settings)) == [
        ("seed", "1"),
        ("strict", "yes"),
        ("sets, alpha", "0.05"),
        ("sets, split", "none"),
        ("rules", "a, b"),
        ("empty", "none"),
    ]
