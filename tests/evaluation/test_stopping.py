"""`fit_stopping`: a policy from a model and held-out data, with its guarantee, and the rule it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import anytime
from anytime.combine import Rule
from anytime.errors import FewRowsWarning, OptionError
from anytime.models import MLP, MLPConfig, MultiExit
from anytime.policy import RiskControl
from anytime.policy.risk import exit_losses


class Stored(MultiExit):
    """Yields stored logits; its inputs are the indices of rows."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.num_exits = logits, len(logits)
        self.unused = nn.Parameter(torch.zeros(()))

    def exits(self, x: Any) -> Iterator[Tensor]:
        yield from self.logits[:, x]


FILE = anytime.samples.cifar100_msdnet()
LOGITS, LABELS = torch.as_tensor(FILE.logits[:]).float(), torch.as_tensor(FILE.labels)


def losses_on_fresh_rows(rule: Rule[Any], *, held_out: int, splits: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """The accuracy lost on rows that were not held out, and their mean exit, for each of some random splits."""
    prediction, model = rule(LOGITS), Stored(LOGITS)
    lost = exit_losses(prediction, LABELS, "gap")
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(splits):
        rows = torch.randperm(len(LABELS), generator=generator)
        held, fresh = rows[:held_out], rows[held_out:]
        policy = anytime.fit_stopping(model, [(held, LABELS[held])], rule=rule, **settings)
        exits = policy.apply(prediction)[fresh]
        found.append((float(lost[exits - 1, fresh].mean()), float(exits.double().mean())))
    risks, exits = torch.tensor(found).T
    return risks, exits


@pytest.mark.parametrize("rule", [anytime.Product(), anytime.Caching()])
@pytest.mark.parametrize("loss", [0.01, 0.03])
def test_the_expected_loss_on_fresh_rows_is_below_the_limit(rule: Rule[Any], loss: float) -> None:
    risks, exits = losses_on_fresh_rows(rule, held_out=500, splits=25, loss=loss)
    assert float(risks.mean()) <= loss
    assert float(exits.mean()) < 6.5  # of 7: inputs do stop early


def test_a_bound_with_high_probability_rarely_fails() -> None:
    risks, exits = losses_on_fresh_rows(anytime.Caching(), held_out=500, splits=25, loss=0.03, method="ltt", delta=0.1)
    assert int((risks > 0.03).sum()) <= 6  # 2.5 are allowed on average; more than 6 have a probability of 1 %
    assert float(exits.mean()) < 6


@pytest.mark.parametrize("classes", [2, 10])
def test_a_runner_uses_the_rule_of_the_policy(classes: int) -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(classes=classes))
    x = torch.randn(400, 2)
    with torch.no_grad():
        labels = model(x)[0].argmax(-1)  # stopping loses nothing
    policy = anytime.fit_stopping(model, [(x, labels)], loss=0.2)
    assert policy.rule == (anytime.Caching() if classes == 2 else anytime.Product())
    with anytime.Runner(Bare(model), policy=policy) as runner:
        answer = runner.predict(x)
    with torch.no_grad():
        expected = policy.answer(policy.rule(model(x)))  # type: ignore[misc]
    assert torch.equal(answer.labels, expected.labels)


class Bare(MultiExit):
    """A model that does not say how many classes it has."""

    def __init__(self, model: MLP) -> None:
        super().__init__()
        self.inner, self.num_exits = model, model.num_exits

    def exits(self, x: Any) -> Iterator[Tensor]:
        yield from self.inner.exits(x)


def test_a_runner_refuses_another_rule() -> None:
    policy = anytime.fit_stopping(Stored(LOGITS), [(torch.arange(1000), LABELS)], loss=0.05, rule="caching")
    with pytest.raises(OptionError, match="Latest") as caught:
        anytime.Runner(Stored(LOGITS), anytime.Latest(), policy=policy)
    assert "Caching" in str(caught.value)


def test_a_saved_model_keeps_the_policy_and_its_rule(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(classes=10))
    x = torch.randn(400, 2)
    with torch.no_grad():
        labels = model(x)[0].argmax(-1)
    policy = anytime.fit_stopping(model, (x, labels), loss=0.2, rule="caching")
    anytime.save(model, tmp_path / "model", policy=policy)
    with torch.no_grad():
        expected = policy.answer(anytime.Caching()(model(x)))
    with anytime.Runner.load(tmp_path / "model") as runner:
        assert torch.equal(runner.predict(x).exit, expected.exit)
    with anytime.Runner.load(tmp_path / "model", rule="latest") as runner:  # for which the policy was not fitted
        assert runner.predict(x).exit == 5


def test_the_rule_is_saved_and_older_files_have_none(tmp_path: Path) -> None:
    policy = anytime.fit_stopping(Stored(LOGITS), [(torch.arange(1000), LABELS)], loss=0.05, rule="caching(ties=later)")
    loaded = anytime.load(policy.save(tmp_path / "policy.json"))
    assert loaded == policy
    assert isinstance(loaded, RiskControl)
    assert loaded.rule == anytime.Caching(ties="later")
    document = policy.document()
    before = {**document, "version": 1, "fields": {k: v for k, v in document["fields"].items() if k != "text"}}
    old = RiskControl.from_document(before)
    assert (old.rule, old.threshold) == (None, policy.threshold)


def test_a_rule_without_a_text_is_not_named() -> None:
    class Own(anytime.Latest):
        def __repr__(self) -> str:
            return "Own"

    policy = anytime.fit_stopping(Stored(LOGITS), [(torch.arange(1000), LABELS)], loss=0.05, rule=Own())
    assert policy.rule is None


def test_too_few_rows_are_announced() -> None:
    with pytest.warns(FewRowsWarning, match=r"60 rows .* 0\.01"):
        policy = anytime.fit_stopping(Stored(LOGITS), [(torch.arange(60), LABELS[:60])], loss=0.01)
    assert policy.mean_exit == 7


def test_three_of_the_five_lines() -> None:
    """Wrap, train heads, calibrate: the loss on fresh digits is small, and inputs stop early."""
    digits = anytime.data.load_digits()
    sets = {name: (part.images / 255.0, part.labels) for name, part in digits.items()}
    torch.manual_seed(0)
    backbone = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.Adam(backbone.parameters(), 3e-3)
    for x, y in DataLoader(TensorDataset(*sets["train"]), 64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(backbone(x), y).backward()
        optimizer.step()
    model = anytime.attach_exits(backbone, at=["3"], example=sets["train"][0][:2], frozen=True)
    anytime.fit(model, sets["train"], epochs=2)
    policy = anytime.fit_stopping(model, sets["val"], loss=0.03)
    x, y = sets["test"]
    with anytime.Runner(model, policy=policy) as runner:
        answer = runner.predict(x)
    with torch.no_grad():
        last = (anytime.Product()(model.eval()(x)).labels[-1] == y).double().mean()
    assert float((answer.labels == y).double().mean()) > float(last) - 0.06
    assert policy.mean_exit < 1.9
