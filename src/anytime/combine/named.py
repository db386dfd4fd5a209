"""Rules by name, for command lines and files: `product`, `product(softplus, weights=ones)`, `caching(ties=later)`.

The syntax is that of `repr(rule)`, with names in any case, so `parse_rule(repr(rule))` is the rule. It is parsed, never
evaluated.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anytime.combine.activations import (
    AdaptiveReLU,
    ClippedReLU,
    Exponential,
    Heaviside,
    ReLU,
    Sigmoid,
    Softplus,
    ThresholdReLU,
)
from anytime.combine.base import Rule
from anytime.combine.learned import Arithmetic, Geometric
from anytime.combine.powers import Powers
from anytime.combine.prediction import Prediction
from anytime.combine.rules import Caching, Latest, Mixture, Product
from anytime.combine.scaled import Cached, Scaled, Tempered
from anytime.errors import OptionError, ShapeError
from anytime.fitted import Fitted


def _by_name(*kinds: Any) -> dict[str, Callable[..., Any]]:
    return {kind.__name__.lower(): kind for kind in kinds}


RULES: Mapping[str, Callable[..., Rule[Any]]] = _by_name(Latest, Caching, Product, Mixture)
# These need the numbers that were fitted, or a rule to wrap.
FITTED: Mapping[str, Callable[..., Rule[Any]]] = _by_name(Geometric, Arithmetic, Powers, Scaled, Tempered, Cached)
ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    **_by_name(ReLU, Heaviside, ClippedReLU, Softplus, Sigmoid, Exponential, ThresholdReLU, AdaptiveReLU),
    "clipped": ClippedReLU,
    "threshold": ThresholdReLU,
    "adaptive": AdaptiveReLU,
}
DEFAULT_RULES = ("latest", "caching", "product")
"""The rules that a comparison shows where the caller names none."""
_KNOWN = {**RULES, **FITTED, **ACTIVATIONS}
_HELP = "such as 'product', 'caching(ties=later)' or 'product(clipped(2), weights=ones)'"


def parse_rule(text: str) -> Rule[Any]:
    """The rule with this name, or name with arguments, as `repr` of a rule prints it.

    Example:
        >>> parse_rule("product(softplus, weights=ones)")
        Product(activation=Softplus(), weights='ones', shift=0.0)
    """
    found = _build(_parse(text.strip(), text), text)
    if not isinstance(found, Rule):
        raise _unknown(text, text.strip(), {**RULES, **FITTED})
    return found


def as_rule(given: Any, *, exits: int | None = None, classes: int | None = None) -> Rule[Any]:
    """The rule of whatever a caller passes as one: a rule, its text, or a fitted object with a `rule`.

    Args:
        given: The rule.
        exits: Of the logits it is for, if known: a fitted object is checked against them.
        classes: Likewise.

    Example:
        >>> as_rule("product") == as_rule(Product()) == Product()
        True
    """
    if isinstance(given, str):
        return parse_rule(given)
    found = getattr(given, "rule", None) if isinstance(given, Fitted) else given
    if not isinstance(found, Rule):
        raise OptionError(
            f"the rule is {given!r}",
            expected="a rule such as anytime.Product(), its text, or a fitted object with a rule",
            fix="pass an instance: Product(), not Product",
        )
    if isinstance(given, Fitted) and exits is not None and classes is not None:
        given.check_fits(exits, classes)
    return found


def name_of(known: Rule[Any]) -> str:
    """The shortest text that `parse_rule` reads as this rule, or its `repr`.

    >>> name_of(Product()), name_of(Caching(ties="later"))
    ('product', "Caching(ties='later')")
    """
    return next((name for name, make in RULES.items() if make() == known), repr(known))


def name_rules(rules: Any) -> dict[str, Any]:
    """The rules by name, with texts parsed."""
    if isinstance(rules, Mapping):
        named = {name: parse_rule(each) if isinstance(each, str) else each for name, each in rules.items()}
    else:
        named = {}
        several = split_rules(rules) if isinstance(rules, str) else [rules] if isinstance(rules, Rule | Fitted) else rules
        if not isinstance(several, Iterable):
            raise OptionError(
                f"rules is {rules!r}", expected="rules or their names", fix="pass a list, such as rules=['latest', 'product']"
            )
        for given in several:
            name = given.strip() if isinstance(given, str) else name_of(as_rule(given))
            if name in named:
                raise OptionError(f"rule {name!r} is given twice", expected="each rule once", fix=f"remove one {name!r}")
            named[name] = parse_rule(given) if isinstance(given, str) else given
    if not named:
        raise OptionError("no rules", expected="at least one rule", fix="pass at least one, such as rules=['product']")
    return named


def split_rules(text: str) -> list[str]:
    """The parts of a comma-separated list; commas inside brackets or quotes do not separate.

    >>> split_rules("latest, product(clipped(2), weights=ones),tuned/rule.json")
    ['latest', 'product(clipped(2), weights=ones)', 'tuned/rule.json']
    """
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        depth += 0 if quote else (char in "([") - (char in ")]")
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def plain_rules(named: Mapping[str, Any], exits: int, classes: int) -> dict[str, Any]:
    """The rules themselves: of a fitted object its rule, after checking that it was fitted for these exits and classes."""
    plain = {}
    for name, given in named.items():
        if isinstance(given, type) or not (callable(given) or isinstance(given, Fitted)):
            raise OptionError(
                f"rule {name!r} is {given!r}", expected="a rule, such as anytime.Product()", fix="create it: anytime.Product()"
            )
        plain[name] = as_rule(given, exits=exits, classes=classes) if isinstance(given, Rule | Fitted) else _Own(name, given)
    return plain


@dataclass(frozen=True, repr=False)
class _Own:
    """A caller's function in place of a rule, with a check of what it returns."""

    name: str
    function: Callable[[Tensor], Any]

    def __repr__(self) -> str:
        return repr(self.function)

    def __call__(self, logits: Tensor) -> Prediction:
        found = self.function(logits)
        if not isinstance(found, Prediction) or found.log_probs.shape != logits.shape:
            shape = f" of shape {tuple(found.log_probs.shape)}" if isinstance(found, Prediction) else ""
            raise ShapeError(
                f"rule {self.name!r} returned a {type(found).__name__}{shape}",
                expected=f"an anytime.combine.Prediction with log-probabilities of shape {tuple(logits.shape)}",
                fix="return Prediction(log_probs, fell_back), of the shapes (exits, batch, classes) and (exits, batch)",
            )
        return found


def _parse(source: str, text: str) -> ast.expr:
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(text) from None


def _build(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_build(part, text) for part in parts)
        case ast.Name(id=name):
            known = _KNOWN.get(name.lower())
            return name if known is None else _make(known, name, (), {}, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(word.arg for word in keywords):
            known = _KNOWN.get(name.lower())
            if known is None:
                raise _unknown(text, name, _KNOWN)
            values = {str(word.arg): _build(word.value, text) for word in keywords}
            return _make(known, name, tuple(_build(arg, text) for arg in args), values, text)
    raise _unreadable(text)


def _make(known: Callable[..., Any], name: str, args: tuple[Any, ...], values: dict[str, Any], text: str) -> Any:
    try:
        return known(*args, **values)
    except OptionError as error:
        raise OptionError(f"rule {text!r}: {error.got}", expected=error.expected, fix=error.fix) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(
            f"rule {text!r}: {name} does not take these arguments ({error})",
            expected=f"a rule {_HELP}",
            fix=f"see the arguments of {getattr(known, '__name__', name)} in anytime.combine",
        ) from None


def _unknown(text: str, name: str, among: Mapping[str, Any]) -> OptionError:
    close = difflib.get_close_matches(name.lower(), among, n=1)
    return OptionError(
        f"rule {text!r}: there is no {name!r}",
        expected=f"one of {', '.join(among)}",
        fix=f"did you mean {close[0]!r}?" if close else f"write a rule {_HELP}",
    )


def _unreadable(text: str) -> OptionError:
    balanced = all(text.count(left) == text.count(right) for left, right in ("()", "[]"))
    return OptionError(
        f"rule {text!r} cannot be parsed",
        expected=f"a name or a name with arguments, {_HELP}",
        fix="write it as in docs/rules.md" if balanced else "balance the brackets",
    )
