"""Every fitted object with a rule is accepted wherever a rule is: Runner, evaluate, certify, prediction sets and the CLI."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import anytime
from anytime import calibrate, conformal
from anytime.calibrate import FittedRule, as_rule
from anytime.cli import run
from anytime.errors import OptionError, ShapeError
from anytime.fitted import Fitted, _checksum
from anytime.models import MLP, MLPConfig

EXITS, CLASSES = 3, 6


def rows(seed: int, count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    logits = 2 * torch.randn(EXITS, count, CLASSES, generator=generator)
    return logits + 2 * torch.nn.functional.one_hot(labels, CLASSES), labels


FIT, TEST = rows(0), rows(1)
ADAPTIVE = {"tuning_logits": rows(2)[0], "tuning_labels": rows(2)[1]}
FITTED: list[Fitted] = [
    calibrate.fit_temperature(*FIT),
    calibrate.fit_temperature(*FIT, "product"),
    calibrate.fit_product(*FIT, steps=3),
    calibrate.fit_adaptive_threshold(*FIT, **ADAPTIVE),
    FittedRule.of(calibrate.fit_geometric(*FIT, epochs=1), exits=EXITS, classes=CLASSES),
    FittedRule.of(calibrate.fit_arithmetic(*FIT, epochs=1), exits=EXITS, classes=CLASSES),
    calibrate.tune(*FIT, penalties=(3.0,)).choose(),
    calibrate.certify(*FIT, "caching"),
    calibrate.certify_choice(*FIT, ["product"], drop=0.9, at_most=0.9),
    conformal.fit_conformal_sets(*FIT, rule="caching"),
]


@pytest.mark.parametrize("fitted", FITTED, ids=lambda fitted: f"{fitted.kind}")
def test_a_fitted_rule_is_accepted_everywhere(fitted: Fitted, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logits, labels = TEST
    rule = as_rule(fitted, exits=EXITS, classes=CLASSES)
    wanted = anytime.evaluate(logits, labels, rules={"it": rule}).rules["it"].accuracy
    assert anytime.evaluate(logits, labels, rules={"it": fitted}).rules["it"].accuracy == wanted
    assert next(iter(anytime.evaluate(logits, labels, rules=[fitted]).rules.values())).accuracy == wanted
    assert calibrate.certify(logits, labels, fitted).rule == rule
    assert conformal.fit_conformal_sets(logits, labels, rule=fitted).rule == rule
    assert calibrate.fit_temperature(logits, labels, fitted).exits == EXITS
    with anytime.Runner(MLP(MLPConfig(classes=CLASSES, inputs=2, exits=EXITS)), calibration=fitted) as runner:
        assert runner.rule == rule
    data, path = tmp_path / "logits.npz", fitted.save(tmp_path / "rule.json")
    np.savez(data, logits=logits.numpy(), labels=labels.numpy())
    assert run(["evaluate", str(data), "--rules", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rules"][str(path)]["accuracy"] == pytest.approx(wanted)


def test_what_has_no_rule_is_refused() -> None:
    logits, labels = TEST
    log_probs = anytime.Latest()(logits).log_probs
    policy = anytime.policy.fit_budget_policy(log_probs, costs=range(1, EXITS + 1), budget=2.0)
    without = conformal.fit_conformal_sets(log_probs, labels, rule=None)
    for wrong in (policy, without, anytime.Product, 3, None):
        with pytest.raises(OptionError, match="the rule is"):
            as_rule(wrong)
    with pytest.raises(OptionError, match="calibration is"):
        anytime.Runner(MLP(MLPConfig(classes=CLASSES, inputs=2, exits=EXITS)), calibration=policy)
    with pytest.raises(ShapeError, match="Temperature was fitted"):
        anytime.evaluate(logits[:2], labels, rules={"it": FITTED[0]})


EARLY_KINDS = {
    "temperature": "temperature",
    "fitted-product": "fitted product",
    "adaptive-threshold": "adaptive threshold",
    "fitted-rule": "fitted rule",
    "tuned-rule": "rule",
    "certificate": "certificate",
    "choice-certificate": "choice certificate",
    "conformal-sets": "conformal-sets",
}


@pytest.mark.parametrize("fitted", FITTED, ids=lambda fitted: f"{fitted.kind}")
def test_files_of_earlier_releases_are_read(fitted: Fitted, tmp_path: Path) -> None:
    """The kinds, versions and field names that releases before 0.2 wrote."""
    document = fitted.document()
    names = {new: old for old, new in fitted.renamed.items()}
    fields = {names.get(name, name): value for name, value in document["fields"].items()}
    body = {**document, "kind": EARLY_KINDS[fitted.kind], "version": fitted.oldest, "fields": fields}
    del body["sha256"]
    path = tmp_path / "early.json"
    path.write_text(json.dumps({**body, "sha256": _checksum(body)}))
    assert anytime.load(path).document() == document
    assert type(fitted).load(path).document() == document
    fitted.save(path)  # an older file of the same kind may be replaced
    assert anytime.load(path).document() == document
