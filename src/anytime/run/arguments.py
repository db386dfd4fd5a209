"""The arguments of a runner: checked, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from anytime.checks import Inputs, check_costs, check_count
from anytime.combine import Intersection, Rule, parse_rule
from anytime.errors import OptionError
from anytime.models import MultiExit, measure_cost
from anytime.policy import FittedPolicy, Policy
from anytime.run.combining import AsGiven, ByIntersection, ByRule, Combiner, choose_rule
from anytime.run.engines import ENGINES, Engine
from anytime.run.engines.choose import check_runnable
from anytime.run.engines.onnx import OnnxRuntimeEngine
from anytime.run.export.loading import ExportedModel
from anytime.run.export.rule_graph import ByGraph, by_graph
from anytime.run.timing.profile import Profile


def make_combiner(
    rule: Rule[Any] | Intersection, engine: Engine, probabilities: bool, class_dim: int | None = None
) -> tuple[Callable[[Inputs], Any], Combiner]:
    """How to start a run, and what combines its outputs."""
    if isinstance(engine, ExportedModel):
        return engine.begin, AsGiven()
    if isinstance(rule, Intersection):
        return engine.begin, ByIntersection(rule)
    if isinstance(engine, OnnxRuntimeEngine) and not probabilities:
        combiner = by_graph(rule, engine.num_exits, engine.classes)
        return engine.begin_arrays if isinstance(combiner, ByGraph) else engine.begin, combiner
    if getattr(engine, "rule", None) == rule and class_dim is None and not probabilities:
        from anytime.run.engines.cuda.rule import ByColumns

        return cast(Any, engine).begin_with_rule, ByColumns(rule, cast(Any, engine).classes)
    return engine.begin, ByRule(rule, probabilities=probabilities, class_dim=class_dim)


def check_dense(class_dim: Any, engine: str | Engine, *, rule: Any, policy: Any, sets: Any, on_too_short: str) -> int | None:
    """The dimension of the classes in the dense logits of an exit; None for plain ones."""
    if class_dim is None:
        return None
    name = engine if isinstance(engine, str) else engine.name
    refused = {
        f"the engine {name!r}": (name != "eager", "omit the engine, which is eager by default"),
        "a regression": (isinstance(rule, Intersection), "omit class_dim: bounds have no classes"),
        "a policy": (policy is not None, "omit the policy"),
        "prediction sets": (sets is not None, "omit the calibration with prediction sets"),
        "on_too_short='prior'": (on_too_short == "prior", "pass on_too_short='raise', the default"),
    }
    for what, (given, fix) in refused.items():
        if given:
            raise OptionError(
                f"class_dim is {class_dim!r}, with {what}",
                expected="a classifier of positions in the eager engine, without policy, prediction sets or prior",
                fix=fix,
            )
    check = check_count(class_dim, "class_dim", low=-(1 << 10), fix="pass class_dim=1 for (batch, classes, height, width)")
    if check == 0:
        raise OptionError("class_dim is 0, the dimension of the batch", expected="that of the classes", fix="pass class_dim=1")
    return check


def count_exits(model: Any, engine: str | Engine) -> int:
    """The number of exits of a model that an engine can run."""
    exits = check_runnable(model)
    if engine not in (*ENGINES, "auto") if isinstance(engine, str) else not hasattr(engine, "begin"):
        close = next(
            (name for name in ENGINES if isinstance(engine, str) and engine and name.startswith(engine.lower())), "auto"
        )
        raise OptionError(
            f"engine is {engine!r}", expected=f"an engine, auto, or one of {', '.join(ENGINES)}", fix=f"use {close!r}"
        )
    if not isinstance(engine, str) and engine.num_exits != exits:
        raise OptionError(
            f"the engine has {engine.num_exits} exits and the model {exits}",
            expected="an engine for this model",
            fix="pass the engine as both: Runner(engine, engine=engine)",
        )
    return exits


def count_classes(model: Any, *fitted: Any) -> int | None:
    """The number of classes, from what was fitted or from the model, if known."""
    known = [each.classes for each in fitted if each is not None and each.classes is not None]
    own = getattr(getattr(model, "config", model), "classes", None)
    return known[0] if known else own if isinstance(own, int) else None


def rule_inside(model: ExportedModel, rule: Any, calibration: Any) -> Rule[Any]:
    """The rule of exported stages; another rule, or a calibration that would change it, is refused."""
    inside = parse_rule(model.rule)
    if choose_rule(inside if rule is None else rule, calibration)[0] != inside:
        raise OptionError(
            f"the exported stages contain the rule {model.rule}",
            expected="no other rule, and no calibration that changes it; prediction sets for it are accepted",
            fix="export the model again with the rule you need",
        )
    return inside


def check_profile(profile: Any) -> Profile | None:
    """A profile, given as such or as its file."""
    known = Profile.load(profile) if isinstance(profile, str | Path) else profile
    if not (known is None or isinstance(known, Profile)):
        raise OptionError(
            f"profile is {profile!r}",
            expected="a Profile, or its file",
            fix="measure one: anytime profile, or anytime.run.profile_model",
        )
    return known


def check_policy(policy: Any, rule: Any) -> Policy | FittedPolicy | None:
    """A policy for classes, fitted or not."""
    if policy is None:
        return None
    if not isinstance(policy, Policy | FittedPolicy):
        raise OptionError(f"policy is {policy!r}", expected="a policy of anytime.policy", fix="pass e.g. Confidence(0.9)")
    if isinstance(rule, Intersection):
        raise OptionError(
            "a policy was given for a regression",
            expected="a classification, whose probabilities it reads",
            fix="omit policy; Budget(exits=...) limits the exits of a regression",
        )
    fitted_for = getattr(policy, "rule", None)
    if fitted_for is not None and fitted_for != rule:
        raise OptionError(
            f"the rule is {rule!r}",
            expected=f"{fitted_for!r}, for which the policy was fitted",
            fix="omit rule and calibration, or fit the policy for this rule: fit_stopping(model, data, rule=...)",
        )
    return policy


def make_prior(on_too_short: str, prior: Any, rule: Any, classes: int | None) -> Tensor | None:
    """The class probabilities to answer with if nothing was computed; None to raise an error."""
    if on_too_short == "raise":
        return None
    if isinstance(rule, Intersection):
        raise OptionError(
            "on_too_short='prior' was given for a regression", expected="a classification", fix="use on_too_short='raise'"
        )
    if prior is None:
        if classes is None:
            raise OptionError(
                "the number of classes is unknown", expected="a prior", fix="pass prior=torch.full((classes,), 1 / classes)"
            )
        return torch.full((classes,), 1 / classes)
    given = torch.as_tensor(prior, dtype=torch.float32)
    if given.ndim != 1 or bool((given < 0).any()) or not abs(float(given.sum()) - 1) < 1e-3:
        raise OptionError(
            f"prior is {prior!r}",
            expected="one probability per class, with sum 1",
            fix="divide by the sum: prior / prior.sum(); omit it for the uniform one",
        )
    if classes is not None and len(given) != classes:
        raise OptionError(
            f"the prior has {len(given)} classes", expected=f"{classes}, as the model", fix="pass one number per class"
        )
    return given


def make_macs(macs: Any, profile: Profile | None, exits: int) -> tuple[float, ...] | None:
    """MACs per input up to each exit, if known."""
    given = macs if macs is not None else None if profile is None else profile.macs
    return None if given is None else tuple(check_costs(given, exits=exits).tolist())


def measure_macs(model: Any, example: Any) -> tuple[float, ...]:
    """MACs per input up to each exit, counted in a forward pass."""
    if not isinstance(model, MultiExit):
        raise OptionError(
            f"a budget in MACs was given for a {type(model).__name__}, whose MACs are unknown",
            expected="the MACs up to each exit",
            fix="pass macs=[...] to the Runner: multiply-accumulates per input up to each exit",
        )
    return tuple(float(macs) for macs in measure_cost(model, example).macs)
