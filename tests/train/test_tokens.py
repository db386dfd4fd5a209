"""Training on tokens: batches by length, a random seed per step, the order of the logits."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.combine import Product
from anytime.data.text import TokenData, collect_vocabulary, load_text, tokenize
from anytime.errors import OptionError
from anytime.models import create
from anytime.models.base import MultiExit
from anytime.train import (
    FitOptions,
    Hardware,
    StrongAugment,
    TrainConfig,
    fit,
    joint_cross_entropy,
    learning_rate,
    on_logits,
    phases,
)
from anytime.train.data.tokens import TokenEvaluation, TokenStep, batch_widths
from anytime.train.gpu.weights import TrainedWeights

RECIPE = TrainConfig(epochs=2, batch=8, lr=1e-3, head_rate=5, optimizer="adamw", schedule="linear", warmup=0.5, seed=3)
TOKENS, CLASSES, LENGTH = 40, 3, 20


def rows(count: int = 44, *, seed: int = 0) -> TokenData:
    """Rows of random lengths; the first token after [CLS] is the class."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (count,), generator=chance)
    ids = torch.randint(4 + CLASSES, TOKENS, (count, LENGTH), generator=chance)
    labels = torch.randint(0, CLASSES, (count,), generator=chance)
    ids[:, 0], ids[:, 1] = 2, 4 + labels
    ids[torch.arange(LENGTH) >= lengths[:, None]] = 0
    return TokenData("toy", "train", ids, lengths, labels, ("a", "b", "c"), torch.arange(count))


def network(**options: Any) -> MultiExit:
    torch.manual_seed(0)
    small = {"vocabulary": TOKENS, "width": 16, "heads": 2, "intermediate": 32, "max_length": LENGTH}
    return create("encoder-tiny", classes=CLASSES, **{**small, **options})


def step(model: MultiExit, data: TokenData, **changes: Any) -> TokenStep:
    return TokenStep(model, data, on_logits(joint_cross_entropy), replace(RECIPE, **changes), Hardware())


@given(st.integers(2, 600))
def test_widths_ascend_to_the_length(length: int) -> None:
    widths = batch_widths(length)
    assert widths[-1] == length
    assert list(widths) == sorted(set(widths))


def test_an_epoch_takes_rows_once_and_as_wide_as_they_need() -> None:
    data = rows()
    training = step(network(), data)
    training.begin(0)
    seen, widths = [], set()
    for index in range(training.steps_per_epoch):
        training(index, 1e-3)
        ids, labels = training.batch()
        batch = training.rows
        width = min(width for width in batch_widths(LENGTH) if width >= int(data.lengths[batch].max()))
        assert torch.equal(ids, data.ids[batch][:, :width])
        assert torch.equal(labels, data.labels[batch])
        seen += batch.tolist()
        widths.add(width)
    assert len(seen) == len(set(seen)) == 40
    assert len(widths) > 1


def test_padding_does_not_change_what_is_learnt() -> None:
    narrow, wide = (network(dropout=0.0) for _ in range(2))
    for model, width in ((narrow, None), (wide, LENGTH)):
        training = step(model, rows(), optimizer="sgd")  # Adam would amplify rounding errors
        training.begin(0)
        if width is not None:
            training._widths = [width] * training.steps_per_epoch
        for index in range(training.steps_per_epoch):
            training(index, 1e-3)
        training.publish(training.steps_per_epoch)
    for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_dropout_depends_on_seed_epoch_and_step_alone() -> None:
    def losses(*, seed: int = 3, epoch: int = 0, index: int = 1, drawn: int = 0) -> list[float]:
        training = step(network(dropout=0.5), rows(), seed=seed)
        training.begin(epoch)
        # The same batch each time, so that a difference is one of the random numbers.
        training.order[:] = torch.arange(len(training.order))
        training._widths = [LENGTH] * training.steps_per_epoch
        training.order[index * 8 : index * 8 + 8] = torch.arange(8)
        torch.rand(drawn)
        training(index, 1e-3)
        return training.take_losses().tolist()

    first = losses()
    assert losses(drawn=7) == pytest.approx(first)
    for other in (losses(seed=4), losses(epoch=1), losses(index=2)):
        assert other != pytest.approx(first, rel=1e-3)


def test_logits_have_the_order_of_the_data() -> None:
    model, data = network(), rows()
    found = TokenEvaluation(model, data, batch=7).logits()
    assert model.training
    with torch.no_grad():
        for row in range(len(data)):
            alone = torch.stack(tuple(model.eval().exits(data.ids[row : row + 1])))
            torch.testing.assert_close(found[:, row], alone[:, 0])
    shares = TokenEvaluation(model, data).accuracy()
    assert shares == pytest.approx((found.argmax(-1) == data.labels).double().mean(1).tolist())


def test_rows_of_other_classes_have_logits_of_the_networks() -> None:
    data = replace(rows(), labels=torch.zeros(44, dtype=torch.int64), class_names=("oos",))
    assert TokenEvaluation(network(), data).logits().shape == (3, 44, CLASSES)


# The recipe's parts for pretrained encoders.


def test_steps_are_those_of_torch_with_faster_heads_and_no_decay_of_vectors() -> None:
    rate, faster, decay = 0.01, 4.0, 0.1
    plain = network(dropout=0.0).requires_grad_(True)
    ours = copy.deepcopy(plain)
    weights = TrainedWeights(ours, TrainConfig(optimizer="adamw", weight_decay=decay, head_rate=faster))
    groups = [
        {
            "params": [p],
            "lr": rate * (faster if name.startswith(("heads", "mixes")) else 1),
            "weight_decay": decay * (p.ndim > 1),
        }
        for name, p in plain.named_parameters()
    ]
    rival = torch.optim.AdamW(groups)
    for _ in range(3):
        # Random gradients: those of a network may be rounding errors, which Adam amplifies.
        gradients = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
        for name, p in plain.named_parameters():
            p.grad = gradients[name].clone()
        rival.step()
        weights.set_lr(rate)
        weights.step([gradients[name] for name in weights.named])
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5, msg=name)


def test_a_linear_schedule_increases_and_decreases_evenly() -> None:
    config = TrainConfig(epochs=4, lr=1.0, schedule="linear", warmup=1)
    rates = [learning_rate(step, steps_per_epoch=2, config=config) for step in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_head_rate_is_refused_with_l2w() -> None:
    with pytest.raises(OptionError, match="head_rate"):
        phases(TrainConfig(objective="l2w", head_rate=2), exits=3, steps_per_epoch=1)


# A run.


def weights_after(folder: Path | None, *, options: dict[str, Any] | None = None, **changes: Any) -> dict[str, torch.Tensor]:
    model = network()
    fit(model, rows(), replace(RECIPE, **changes), val=rows(9), options=FitOptions(folder=folder, **(options or {})))
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("objective", ["joint", "distillation", "joint-then-product"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    whole = weights_after(None, objective=objective)
    calls, plain = 0, TokenStep.__call__

    def dies(self: TokenStep, index: int, lr: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:  # in the second epoch of five steps each
            raise KeyboardInterrupt
        plain(self, index, lr)

    monkeypatch.setattr(TokenStep, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        weights_after(tmp_path, objective=objective, options={"checkpoint_every": 1})
    monkeypatch.undo()
    torch.rand(5)
    again = weights_after(tmp_path, objective=objective, options={"resume": True})
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name


def test_a_checkpoint_of_rows_of_another_length_is_refused(tmp_path: Path) -> None:
    weights_after(tmp_path)
    data = rows()
    cut = replace(data, ids=data.ids[:, :16], lengths=data.lengths.clamp(max=16))
    with pytest.raises(OptionError, match="length was 20 and is 16"):
        fit(network(), cut, RECIPE, options=FitOptions(folder=tmp_path, resume=True))


def test_heads_learn_on_a_frozen_encoder_without_dropout_in_it() -> None:
    model = network(dropout=0.5)
    before = copy.deepcopy(model.state_dict())
    recipe = replace(RECIPE, frozen=("encoder",), hold_statistics=True)
    training = TokenStep(model, rows(), on_logits(joint_cross_entropy), recipe, Hardware())
    dropping = {name for name, part in training.network.named_modules() if isinstance(part, torch.nn.Dropout) and part.training}
    assert dropping == {"dropout"}
    fit(model, rows(), recipe)
    for name, value in model.state_dict().items():
        # The mix of a single layer has nothing to learn.
        if name != "mixes.0.weight":
            assert torch.equal(value, before[name]) == name.startswith("encoder."), name


@pytest.mark.parametrize("objective", ["joint", "product", "joint-then-product", "sdn", "distillation"])
def test_every_objective_for_logits_learns(objective: str) -> None:
    model = network(dropout=0.0)
    recipe = replace(RECIPE, objective=objective, epochs=12, lr=5e-3, batch=16, head_rate=1.0)
    fit(model, rows(200), recipe)
    rule = Product() if "product" in objective else None
    assert min(TokenEvaluation(model, rows(100, seed=1)).accuracy(rule)) > 0.9


@pytest.mark.parametrize(
    ("changes", "hardware"),
    [
        ({"objective": "l2w", "head_rate": 1}, Hardware()),
        ({"strong_augment": StrongAugment(erasing=0.25)}, Hardware()),
        ({}, Hardware(compile=True)),
    ],
)
def test_settings_that_texts_do_not_support_are_refused(changes: dict[str, Any], hardware: Hardware) -> None:
    with pytest.raises(OptionError, match="texts"):
        fit(network(), rows(), replace(RECIPE, **changes), hardware=hardware)


def test_texts_are_learnt_with_smoothed_labels_and_averaged_weights() -> None:
    model = network(dropout=0.0)
    recipe = replace(RECIPE, epochs=12, lr=5e-3, batch=16, head_rate=1.0, label_smoothing=0.1, average_decay=0.9)
    outcome = fit(model, rows(200), recipe)
    assert min(TokenEvaluation(model, rows(100, seed=1)).accuracy()) > 0.9
    least = -(0.9 + 0.1 / 3) * math.log(0.9 + 0.1 / 3) - 2 * 0.1 / 3 * math.log(0.1 / 3)  # the entropy of a smoothed label
    assert min(outcome.history[-1].losses) > least


def test_an_encoder_learns_real_questions_from_scratch(shared: Path) -> None:
    folder = shared / "data" / "text"
    if not (folder / "trec.parquet").is_file():
        pytest.skip(f"no texts in {folder}")
    pytest.importorskip("pyarrow", reason="pyarrow reads the texts")
    parts = load_text("trec", folder, distinct=True)
    some = parts["train"].take(torch.arange(1600))
    tokenizer = collect_vocabulary(some.texts, size=4096)
    train, test = (tokenize(part, tokenizer, length=24) for part in (some, parts["test"]))
    torch.manual_seed(0)
    model = create("encoder-tiny", classes=6, vocabulary=len(tokenizer))
    fit(model, train, TrainConfig(epochs=4, batch=32, lr=2e-3, optimizer="adamw", schedule="linear", warmup=0.5))
    # The most frequent class has 138 of the 500 test rows.
    assert min(TokenEvaluation(model, test).accuracy()) > 0.6
