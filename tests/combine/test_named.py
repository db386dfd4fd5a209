from __future__ import annotations

import pytest

import anytime
from anytime.combine.named import name_of
from anytime.errors import OptionError


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "pruduct",
        "relu",
        "3",
        "'product'",
        "product(",
        "product)",
        "product(nonsense)",
        "product(nonsense(3))",
        "product(1, 2, 3, 4)",
        "product(weight=ones)",
        "product(**{})",
        "product(*[1])",
        "__import__('os').system('true')",
        "product.__class__",
        "product(activation=lambda f: f)",
        "(" * 5000,
        "product\0",
    ],
)
def test_a_text_that_names_no_rule_is_refused_with_help(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        anytime.parse_rule(text)
    assert repr(text) in caught.value.got


def test_a_near_miss_gets_a_suggestion() -> None:
    with pytest.raises(OptionError, match="did you mean 'product'"):
        anytime.parse_rule("produkt")


def test_names_of_default_rules_are_short() -> None:
    assert [name_of(anytime.parse_rule(name)) for name in ("latest", "caching", "product", "mixture")] == [
        "latest",
        "caching",
        "product",
        "mixture",
    ]
