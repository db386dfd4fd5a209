"""Compiled code gives the numbers of the plain path: counts identical, sums within 1e-6, sets unless rounding decides."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import anytime
from anytime.combine import Prediction
from anytime.combine.prediction import log_odds
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.errors import AnytimeError, MissingExtraError, OptionError
from anytime.evaluation import compiled, measure_guarantees
from anytime.evaluation.blocks import BlockTask, Followed, LogitRows, SetThresholds, follow_chunk

pytest.importorskip("numba")
pytestmark = pytest.mark.xdist_group("compiled")  # one process compiles

RULES = (
    "latest",
    "caching",
    "caching(ties=later)",
    "product",
    "product(weights=ones)",
    "product(weights=(0, 1, 0.5))",
    "product(shift='1/K')",
    "product(heaviside(-0.5))",
    "product(clipped(2))",
    "product(threshold(1.5))",
    "product(threshold(1.5, mode=clamp))",
    "product(softplus, weights=ones)",
    "product(exponential)",
    "mixture",
    "mixture(softplus)",
    "mixture(heaviside, weights=linear)",
    "mixture(weights=(1, 0, 2))",
)
DTYPES = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)]
ILL_CONDITIONED = ("correlation", "exponent", "concavity_gap", "gains")


def some(rows: int = 400, classes: int = 40, exits: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits whose later exits are better, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    logits = 2 * torch.randn(exits, rows, classes, generator=generator) - 1
    logits[:, torch.arange(rows), labels] += torch.linspace(2, 5, exits)[:, None]
    return logits, labels


def assert_equal_numbers(found: Any, wanted: Any, rows: int, name: str = "") -> None:
    """A set may differ by rounding in one row of a hundred; drops, accuracies and all other counts may not."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal_numbers(found[key], wanted[key], rows, f"{name}.{key}")
    elif isinstance(wanted, list | tuple):
        for one, other in zip(found, wanted, strict=True):
            assert_equal_numbers(one, other, rows, name)
    elif wanted is None:
        assert found is None, name
    elif name.startswith(".set_"):
        assert found == pytest.approx(wanted, abs=100 * max(1, rows // 100) / rows), name
    elif name.rsplit(".", 1)[-1] in ILL_CONDITIONED:
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    else:
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-7), name


def assert_engines_agree(logits: Any, labels: Any = None, **options: Any) -> None:
    one, other = (anytime.evaluate(logits, labels, engine=engine, **options) for engine in ("compiled", "plain"))
    assert (one.settings["engine"], other.settings["engine"]) == ("compiled", "plain")
    assert list(one.rules) == list(other.rules)
    for name, wanted in other.rules.items():
        assert_equal_numbers(one.rules[name].to_json(), wanted.to_json(), other.samples)
    assert [each.row for each in one.examples] == [each.row for each in other.examples]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), [(400, 40), (300, 5), (50, 2), (40, 1000)])
def test_every_rule_has_the_metrics_of_the_plain_path(rows: int, classes: int, dtype: torch.dtype) -> None:
    logits, labels = some(rows, classes)
    # The mean of hard evidence often has two largest classes, of which rounding chooses one.
    assert_engines_agree(
        logits.to(dtype), labels, rules=[rule for rule in RULES if rule != "mixture(heaviside, weights=linear)"]
    )


@pytest.mark.parametrize("raps", [Raps(variant="original"), Raps(randomised=False), Raps(lam_reg=0.0), Raps(0.2, empty=False)])
def test_sets_of_every_kind_agree(raps: Raps) -> None:
    assert_engines_agree(*some(), rules=("latest", "caching", "product"), sets=raps)


def test_the_reference_logits_agree(shared: Path) -> None:
    for name in ("cifar10", "cifar100"):
        with np.load(shared / "reference" / f"msdnet-{name}-check.npz") as file:
            arrays = {key: file[key] for key in file.files}
        logits = next(value for value in arrays.values() if value.ndim == 3 and value.dtype.kind == "f")
        labels = next(
            (value for value in arrays.values() if value.shape == logits.shape[1:2] and value.dtype.kind in "iu"), None
        )
        assert_engines_agree(logits, labels, rules=("latest", "caching", "caching(ties=later)", "product", "mixture"))


def test_the_samples_agree() -> None:
    file = anytime.samples.cifar100_msdnet()
    assert_engines_agree(file, rules=("latest", "caching", "product", "product(softplus, weights=ones)", "mixture"))


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "half", "bfloat16", "fortran", "big-endian", "strided"])
def test_files_of_every_kind_agree(tmp_path: Path, kind: str) -> None:
    logits, labels = some(120, 12)
    values, path = logits.numpy(), tmp_path / "logits.npy"
    match kind:
        case "npz":
            path = tmp_path / "logits.npz"
            np.savez(path, logits=values)
        case "safetensors" | "bfloat16":
            path = tmp_path / "logits.safetensors"
            save_file({"logits": logits.bfloat16() if kind == "bfloat16" else logits}, path)
        case "strided":
            assert_engines_agree(logits.transpose(0, 1).contiguous().transpose(0, 1), labels)
            assert_engines_agree(np.ascontiguousarray(values[:, :, ::-1])[:, :, ::-1], labels)
            return
        case _:
            change = {"half": np.float16, "big-endian": ">f4"}.get(kind, np.float32)
            np.save(path, np.asfortranarray(values) if kind == "fortran" else values.astype(change))
    assert_engines_agree(path, labels)


def test_data_without_labels_tiny_data_and_probabilities_agree() -> None:
    logits, labels = some(60, 8)
    assert_engines_agree(logits)
    assert_engines_agree(logits[:, :1], labels[:1])
    assert_engines_agree(logits[:, :7], labels[:7])
    assert_engines_agree(logits.softmax(-1), labels, probabilities=True)


def test_other_rules_take_the_plain_path_beside_compiled_code() -> None:
    def uniform(logits: Tensor) -> Prediction:
        return Prediction(torch.zeros_like(logits).log_softmax(-1), torch.zeros(logits.shape[:2], dtype=torch.bool))

    rules = {"uniform": uniform, "product": anytime.Product(), "sigmoid": anytime.parse_rule("product(sigmoid)")}
    assert_engines_agree(*some(), rules=rules)


def test_more_exits_than_classes_agree() -> None:
    logits, labels = some(100, 2, exits=30)
    assert_engines_agree(logits, labels, rules=("latest", "caching", "product", "mixture"))


def test_guarantees_of_rules_that_are_not_known_take_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ENOUGH", 1)
    monkeypatch.setattr(compiled, "MANY_CLASSES", 1)
    found = measure_guarantees(some(60, 4), some(60, 4, seed=1), rules=["mixture"])
    assert found.evaluation.settings["engine"] == "plain"


def test_dense_logits_agree() -> None:
    labels = torch.randint(0, 5, (9, 4, 6))
    labels[0, 0] = 255
    logits = 2 * torch.randn(3, 9, 5, 4, 6)
    assert_engines_agree(logits, labels, class_dim=2, ignore_index=255)


def test_a_subclass_of_a_rule_is_not_taken_for_the_rule() -> None:
    class Reversed(anytime.Latest):
        def _update(self, state: Any, logits: Tensor) -> Any:
            return super()._update(state, -logits)

    assert_engines_agree(*some(), rules={"reversed": Reversed(), "latest": anytime.Latest()})


def test_results_do_not_depend_on_how_rows_are_split() -> None:
    logits, labels = some(200, 10)
    whole = anytime.evaluate(logits, labels, engine="compiled")
    parts = anytime.evaluate(logits.half().float(), labels, engine="compiled", block_rows=7)
    halves = anytime.evaluate(logits.half(), labels, engine="compiled", block_rows=64)
    for name in whole.rules:
        assert_equal_numbers(parts.rules[name].to_json(), halves.rules[name].to_json(), 200)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_that_is_not_finite_is_named_by_exit_and_row(value: float) -> None:
    logits, labels = some(300, 6)
    logits[2, 271, 3] = value
    with pytest.raises(AnytimeError, match="exit 3, row 271"):
        anytime.evaluate(logits, labels, engine="compiled")


def test_guarantees_agree() -> None:
    test, held = some(300, 10, seed=1), some(200, 10, seed=2)
    one, other = (measure_guarantees(test, held, engine=engine) for engine in ("compiled", "plain"))
    assert one.evaluation.settings["engine"] == "compiled"
    for name, wanted in other.rules.items():
        found = one.rules[name]
        assert_equal_numbers(found.before.to_json(), wanted.before.to_json(), 300)
        assert found.certificate == wanted.certificate
        assert found.budget.accuracy == pytest.approx(wanted.budget.accuracy, abs=1 / 300)


SPECIAL = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-30, 1e-9, 1.0, 37.0, 104.0, 800.0, 1e8, 1e30, 3e38]
VALUES = st.sampled_from([sign * size for size in SPECIAL for sign in (1.0, -1.0)]) | st.floats(-20, 20, width=32)


@st.composite
def hostile(draw: st.DrawFn, exits: int = 3, rows: int = 4, classes: int = 5) -> Tensor:
    size = exits * rows * classes
    kind = draw(st.sampled_from(["any", "equal", "negative", "few values", "one positive"]))
    numbers = draw(st.lists(VALUES, min_size=size, max_size=size))
    if kind == "equal":
        numbers = numbers[:1] * size
    elif kind == "few values":
        numbers = [numbers[index % 3] for index in draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))]
    logits = torch.tensor(numbers, dtype=torch.float32).view(exits, rows, classes)
    if kind in ("negative", "one positive"):
        logits = -logits.abs()
    if kind == "one positive":
        logits[..., draw(st.integers(0, classes - 1))] = 2.5
    return logits


def engines(rule: str, logits: Tensor, sets: SetThresholds | None = None) -> tuple[Followed, Followed]:
    combiners = {rule: anytime.parse_rule(rule).combine}
    rows = LogitRows(logits, torch.arange(logits.shape[1]) % logits.shape[2])
    draws = torch.full(logits.shape[:2], 0.25)
    one, other = (
        follow_chunk(rows, BlockTask(combiners, sets=sets, path=way), 3, slice(0, logits.shape[1]), draws)
        for way in ("compiled", "plain")
    )
    return one.rules[rule], other.rules[rule]


def nearly_tied(logits: Tensor) -> Tensor:
    """The rows of which two exits are equally confident up to rounding: either answer may be cached."""
    values = logits.double()
    odds = log_odds(values, values.argmax(-1))
    near = (odds[:, None] - odds).abs() <= 1e-5 * (1 + odds.abs())
    return (near & (logits[:, None] != logits).any(-1)).any(0).any(0)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(logits=hostile(), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_hostile_numbers_agree(rule: str, logits: Tensor, dtype: torch.dtype) -> None:
    logits = logits.clamp(-6e4, 6e4) if dtype == torch.float16 else logits
    if rule.startswith("caching"):
        logits = logits[:, ~nearly_tied(logits.to(dtype))]
        if not logits.shape[1]:
            return
    found, wanted = (each.seen for each in engines(rule, logits.to(dtype)))
    log_probs = anytime.parse_rule(rule).combine(logits.to(dtype).float()).log_probs
    chosen = log_probs.gather(-1, found.answer[..., None])[..., 0]
    # Evidence that is equal in exact arithmetic may be rounded apart, relative to its size; then either label is right.
    tied = chosen >= log_probs.amax(-1) - 1e-5 * (1 + logits.float().abs().amax(-1).log1p() * 10)
    assert bool((tied | (found.answer == wanted.answer)).all())
    same = found.answer == wanted.answer
    torch.testing.assert_close(found.fell_back, wanted.fell_back)
    torch.testing.assert_close(found.support[same], wanted.support[same])
    torch.testing.assert_close(found.confidence, wanted.confidence, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.entropy, wanted.entropy, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.square, wanted.square, rtol=1e-4, atol=1e-4)
    assert found.label is not None
    assert wanted.label is not None
    torch.testing.assert_close(found.label.clamp(min=-80)[same], wanted.label.clamp(min=-80)[same], rtol=1e-4, atol=1e-3)
    final = same & same[-1]
    torch.testing.assert_close(found.final[final], wanted.final[final], rtol=1e-3, atol=1e-4)
    for values in (found.confidence, found.final, found.entropy, found.square):
        assert bool(values.isfinite().all())


@pytest.mark.parametrize("rule", ["latest", "product", "product(heaviside)", "mixture"])
@pytest.mark.parametrize("limit", [0.0, 0.31, 0.951, 1.0123, 1.5, 30.0, float("inf")])
def test_sets_have_the_size_of_sorted_rows(rule: str, limit: float) -> None:
    for kind, raps in {"paper": Raps(), "original": Raps(variant="original"), "aps": Raps(lam_reg=0, randomised=False)}.items():
        for classes in (3, 60, 700):
            logits, _ = some(20, classes, seed=classes)
            logits[:, :3] = logits[:, :3].round()  # ties
            logits[:, 3] = -logits[:, 3].abs()  # collapsed
            found, wanted = engines(rule, logits, SetThresholds(raps, {rule: torch.full((3,), limit)}, 1))
            assert found.size is not None
            assert wanted.size is not None
            assert int((found.size != wanted.size).sum()) == 0, (kind, classes)
            prediction = anytime.parse_rule(rule).combine(logits)
            rank = rank_of(prediction.log_probs, sort_rows(prediction.log_probs), torch.arange(20) % classes)
            assert found.covered is not None
            assert int((found.covered != (rank < found.size)).sum()) <= 1


def test_a_set_of_float64_logits_that_are_far_apart_is_found() -> None:
    """The search must end also among classes with probabilities that float32 does not have."""
    logits = torch.linspace(0, 700, 30, dtype=torch.float64).expand(2, 4, 30).contiguous()
    for limit in (0.5, 1.1, 30.0):
        found, wanted = engines("latest", logits, SetThresholds(Raps(), {"latest": torch.full((2,), limit)}, 1))
        assert found.size is not None
        assert wanted.size is not None
        assert torch.equal(found.size, wanted.size)


def test_two_exits_with_the_classes_in_another_order_are_equally_confident() -> None:
    logits, _ = some(50, 30)
    order = torch.randperm(30)
    twice = torch.stack((logits[0], logits[0][:, order]))
    for way in (0, 1):
        earlier, later = (engines(rule, twice)[way].seen.answer for rule in ("caching", "caching(ties=later)"))
        assert torch.equal(earlier[1], earlier[0])
        assert torch.equal(later[1], twice[1].argmax(-1))


def test_auto_takes_the_plain_path_for_little_data_and_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = some(40, 4)
    assert anytime.evaluate(logits, labels).settings["engine"] == "plain"
    monkeypatch.setattr(compiled, "ENOUGH", 1)
    assert anytime.evaluate(logits, labels).settings["engine"] == "plain"
    monkeypatch.setattr(compiled, "MANY_CLASSES", 4)
    assert anytime.evaluate(logits, labels).settings["engine"] == "compiled"
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert anytime.evaluate(logits, labels).settings["engine"] == "plain"


MISTAKES: dict[str, tuple[Any, type[AnytimeError], str]] = {
    "an unknown engine": (lambda: anytime.evaluate(*some(), engine="fast"), OptionError, "engine"),  # type: ignore[arg-type]
    "no rule that is known": (
        lambda: anytime.evaluate(*some(), engine="compiled", rules=["product(sigmoid)"]),
        OptionError,
        "Sigmoid",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name: str) -> None:
    call, kind, word = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    assert word in str(caught.value)
    assert caught.value.got
    assert caught.value.expected
    assert caught.value.fix


@pytest.mark.parametrize("why", ["missing", "disabled"])
def test_compiled_code_that_cannot_run_names_the_extra(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "missing":
        monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    else:
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(MissingExtraError, match=r"anytime-nn\[fast\]"):
        anytime.evaluate(*some(), engine="compiled")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_preparation_is_announced_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(compiled, "_PATIENCE", 0.01)
    with compiled._announced():
        time.sleep(0.2)
    assert ("compiling" in stream.getvalue(), "ready" in stream.getvalue()) == (terminal, terminal)


def test_without_a_folder_for_the_cache_code_is_compiled_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytime.evaluation.compiled import numbers

    def refuse(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numbers, "njit", refuse)
    assert numbers.cached(len) is len


def test_a_full_disk_below_the_cache_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytime.evaluation.compiled import plan

    follow, calls = plan.CompiledKernel.follow, []

    def fail(*args: Any) -> Any:
        calls.append("save")
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail_to_save_once(*args: Any) -> Any:
        return follow(*args) if calls else fail()  # numba saves the code after it is ready to run

    cache = SimpleNamespace(flush=fail, disable=lambda: calls.append("disable"))
    monkeypatch.setattr(plan._follow_rows(), "_cache", cache)
    monkeypatch.setattr(plan.CompiledKernel, "follow", fail_to_save_once)
    assert anytime.evaluate(*some(), engine="compiled").settings["engine"] == "compiled"
    assert calls == ["save", "save", "disable"]


@pytest.mark.long
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_damaged_cache_is_replaced(tmp_path: Path, ending: str) -> None:
    program = "import torch, anytime; print(anytime.evaluate(torch.randn(2, 30, 5), engine='compiled', rules=['latest']))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        (file,) = tmp_path.rglob(f"*.{ending}")
        assert file.stat().st_size > 3000
        os.truncate(file, 3000)
