"""The Triton kernel gives the numbers of the plain path, on a GPU or, where there is none, in Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.combine import Sigmoid
from anytime.combine.fused import combine_product
from anytime.conformal import Raps
from anytime.errors import LabelError, NonFiniteError, OptionError
from anytime.evaluation.blocks import BlockTask, Chunk, LogitRows, SetThresholds, follow_chunk
from anytime.metrics import Metrics
from anytime.metrics.fused import fused_rules

pytest.importorskip("triton", reason="needs Triton, which CUDA builds of torch include")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = (
    "latest",
    "caching",
    "product",
    "product(weights=(0, 1, 0.5))",
    "product(shift='1/K')",
    "product(heaviside(-0.5))",
    "product(clipped(2))",
    "product(threshold(1.5))",
    "product(threshold(1.5, mode=clamp))",
    "product(softplus, weights=ones)",
    "product(exponential)",
    "mixture",
    "mixture(softplus, weights=linear)",
)


def some(rows: int = 60, classes: int = 12, exits: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    logits = 2 * torch.randn(exits, rows, classes, generator=generator) - 1
    logits[:, torch.arange(rows), labels] += torch.linspace(2, 5, exits)[:, None]
    logits[:, :5] = -logits[:, :5].abs()  # rows that collapse
    return logits, labels


def both(logits: Tensor, labels: Tensor, rules: Any, sets: SetThresholds | None = None) -> tuple[Chunk, Chunk]:
    """Rows followed by the kernel and by plain operations on the CPU."""
    combiners = {rule: anytime.parse_rule(rule).combine for rule in rules}
    draws = torch.rand(logits.shape[:2], generator=torch.Generator().manual_seed(1))
    found = []
    for path, device in (("triton", DEVICE), ("plain", "cpu")):
        rows = LogitRows(logits.to(device), labels.to(device))
        task = BlockTask(combiners, sets=sets, path=path)  # type: ignore[arg-type]
        found.append(follow_chunk(rows, task, 16, slice(0, len(labels)), draws))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 12, 200])
def test_every_rule_has_the_numbers_of_the_plain_path(classes: int, dtype: torch.dtype) -> None:
    logits, labels = some(40, classes)
    found, wanted = both(logits.to(dtype), labels, RULES)
    for name, each in wanted.rules.items():
        one, other = found.rules[name].seen, each.seen
        for field in ("answer", "support", "fell_back", "correct"):
            assert torch.equal(getattr(one, field).cpu().long(), getattr(other, field).long()), (name, field)
        for field in ("confidence", "final", "entropy", "square", "label"):
            torch.testing.assert_close(
                getattr(one, field).cpu(), getattr(other, field), rtol=3e-6, atol=3e-6, msg=f"{name} {field}"
            )


@pytest.mark.parametrize("limit", [0.0, 0.31, 0.951, 1.5, 30.0, math.inf])
@pytest.mark.parametrize("raps", [Raps(), Raps(variant="original"), Raps(lam_reg=0, randomised=False), Raps(empty=False)])
def test_sets_have_the_size_of_sorted_rows(raps: Raps, limit: float) -> None:
    logits, labels = some(30, 60)
    logits[:, 5:8] = logits[:, 5:8].round()  # ties
    rules = ("latest", "caching", "product", "product(heaviside)", "mixture")
    found, wanted = both(logits, labels, rules, SetThresholds(raps, dict.fromkeys(rules, torch.full((3,), limit)), 1))
    for rule in rules:
        size, covered = found.rules[rule].size, found.rules[rule].covered
        assert size is not None
        assert covered is not None
        assert int((size.cpu() != wanted.rules[rule].size).sum()) == 0
        assert int((covered.cpu() != wanted.rules[rule].covered).sum()) <= 1  # rounding may order a tie


def test_an_evaluation_has_the_document_of_the_plain_path() -> None:
    logits, labels = some(120, 20)
    rules = ["latest", "caching", "product", "product(sigmoid)", "caching(ties=later)"]  # the kernel leaves two of them out
    found = anytime.evaluate(logits.to(DEVICE), labels.to(DEVICE), rules=rules, engine="triton")
    wanted = anytime.evaluate(logits, labels, rules=rules, engine="plain")
    assert found.settings == {**wanted.settings, "engine": "triton"}
    for name, each in wanted.rules.items():
        assert found.rules[name].accuracy == each.accuracy
        assert found.rules[name].label_drop_percent == each.label_drop_percent
        assert found.rules[name].set_coverage == each.set_coverage
        assert found.rules[name].nll == pytest.approx(each.nll, rel=1e-6)
    assert [each.row for each in found.examples] == [each.row for each in wanted.examples]
    assert [each.row for each in found.worst] == [each.row for each in wanted.worst]


@pytest.mark.parametrize("rule", ["latest", "product", "mixture(softplus)"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_named_by_exit_and_row(rule: str, value: float) -> None:
    logits, labels = some()
    logits[2, 41, 3] = value
    with pytest.raises(NonFiniteError, match="exit 3, row 41"):
        anytime.evaluate(logits.to(DEVICE), labels.to(DEVICE), rules=[rule], engine="triton")


def test_logits_that_the_kernel_does_not_take_are_refused_or_computed_plainly() -> None:
    wide = torch.randn(2, 4, 20_000)
    device = torch.device(DEVICE)
    combiners = {"latest": anytime.Latest().combine}
    assert fused_rules(combiners, exits=2, classes=20_000, dtype=wide.dtype, device=device) is None
    with pytest.raises(OptionError, match="engine='triton'"):
        anytime.evaluate(wide.to(DEVICE), engine="triton")
    assert anytime.evaluate(wide).settings["engine"] == "plain"


def test_metrics_in_a_loop_are_those_of_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytime.metrics.accumulate.is_read_at_once", lambda values: False)
    monkeypatch.setattr("anytime.metrics.accumulate._WAITING_BYTES", 3 * 12 * 4 * 25)  # 25 rows
    logits, labels = some()
    rules = ("latest", "caching", "product", "product(sigmoid)")
    metrics = Metrics(rules)
    for rows in torch.arange(60).split(11):
        metrics.update(list(logits[:, rows].to(DEVICE)), labels[rows].to(DEVICE))
    wanted = anytime.evaluate(logits, labels, rules=rules, sets=None, engine="plain")
    for name, each in metrics.compute().items():
        assert each.accuracy == wanted.rules[name].accuracy
        assert each.label_drop_percent == wanted.rules[name].label_drop_percent
        assert each.entropy == pytest.approx(wanted.rules[name].entropy, rel=1e-6)


def test_metrics_in_a_loop_name_the_first_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytime.metrics.accumulate.is_read_at_once", lambda values: False)
    logits, labels = some()
    logits[1, 33, 2] = math.nan
    metrics = Metrics()
    for rows in torch.arange(60).split(20):
        metrics.update(logits[:, rows].to(DEVICE), labels[rows].to(DEVICE))
    with pytest.raises(NonFiniteError, match="exit 2, row 33"):
        metrics.compute()
    metrics.reset()
    metrics.update(logits[:, :20].to(DEVICE), (labels[:20] + 12).to(DEVICE))
    with pytest.raises(LabelError, match="row 0"):
        metrics.compute()


@pytest.mark.parametrize("classes", [2, 12, 200])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.startswith("product")])
def test_the_product_is_that_of_the_plain_operations(rule: str, classes: int) -> None:
    logits, _ = some(40, classes)
    product = anytime.parse_rule(rule)
    assert isinstance(product, anytime.Product)
    found, wanted = combine_product(product, logits.to(DEVICE)), product.combine(logits)
    assert found is not None
    assert torch.equal(found.labels.cpu(), wanted.labels)
    assert torch.equal(found.fell_back.cpu(), wanted.fell_back)
    torch.testing.assert_close(found.log_probs.cpu(), wanted.log_probs, rtol=2e-6, atol=2e-6)


def test_a_product_whose_gradient_is_needed_takes_the_plain_operations() -> None:
    logits, _ = some(4, 5)
    assert combine_product(anytime.Product(), logits.to(DEVICE).requires_grad_()) is None
    assert combine_product(anytime.Product(Sigmoid()), logits.to(DEVICE)) is None
    assert combine_product(anytime.Product(), logits[:, :0].to(DEVICE)) is None


@pytest.mark.long
def test_the_kernels_compile_for_a_gpu() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250, env=environment)
    assert ended.stdout.count("compiled") == 15, ended.stderr
