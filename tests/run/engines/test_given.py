"""Inputs that a model does not take: the same errors from every engine, in place of those of torch and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import DtypeError, InputError, ShapeError
from anytime.models import MLP, Carry, MLPConfig, MultiExit
from anytime.run import Runner
from anytime.run.engines import make_engine
from anytime.run.engines.choose import run_all
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.folding import difference
from anytime.run.export import export, load_exported

EVERY = ["eager", "generator", "folded", "onnxruntime", "cuda-graphs", "exported"]
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Images(MultiExit):
    """Convolutions, which take an image without a batch as well, and a norm, which does not."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), nn.Conv2d(4, 4, 3)])
        self.heads = nn.ModuleList(nn.Linear(4, 5) for _ in range(2))

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        x = self.parts[exit](*carry)
        return ((x,) if exit == 0 else ()), self.heads[exit](x.mean((-2, -1)))


class Generated:
    num_exits, classes = 2, 5

    def __init__(self) -> None:
        self.model = Images().eval()

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield from self.model.exits(x)


@pytest.fixture
def make(request: Any, tmp_path: Any, recorder: Any) -> Any:
    """An engine by name for a model."""

    def made(name: str, model: Any, example: Any) -> Any:
        if name in ("onnxruntime", "exported"):
            pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
        if name == "exported":
            return load_exported(export(model, tmp_path / "stages", rule="latest", example=example))
        if name == "cuda-graphs":
            return CudaGraphsEngine(model, example, sizes=(2,), recorder=recorder)
        if name == "generator":
            return make_engine(Generated(), "eager")
        return make_engine(model, name, example=example)

    return made


@pytest.mark.parametrize("name", EVERY)
def test_pixels_and_a_single_image_are_refused_with_a_fix_that_works(name: str, make: Any) -> None:
    engine, pixels = make(name, Images().eval(), IMAGES), torch.randint(0, 255, IMAGES.shape, dtype=torch.uint8)
    with Runner(engine, "latest", engine) as runner:
        for given in (pixels, pixels[0], pixels.to(torch.int64)):
            with pytest.raises(DtypeError, match=r"x is torch\..*int\d+\n  expected: floating-point") as wrong:
                runner.predict(given)
        assert "x.float() / 255" in wrong.value.fix
        with pytest.raises(ShapeError, match=r"x has shape \(3, 8, 8\)\n  expected: inputs with the batch first") as alone:
            runner.predict(IMAGES[0], deadline="20s")
        assert "x[None]" in alone.value.fix
        assert runner.predict(pixels.float() / 255).exit == runner.predict(IMAGES[0][None]).exit == 2


@pytest.mark.parametrize("name", ["eager", "folded", "onnxruntime", "cuda-graphs", "exported"])
def test_several_inputs_are_named_in_errors(name: str, make: Any, two: Any) -> None:
    x = two.texts()
    engine = make(name, two.TwoInputs().eval(), x)
    ids, mask = x["input_ids"], x["attention_mask"]
    with pytest.raises(DtypeError, match=r"x\['input_ids'\] is torch.float32\n  expected: integers"):
        engine.begin({"input_ids": ids.float(), "attention_mask": mask}).advance()
    with pytest.raises(ShapeError, match=r"x\['input_ids'\] has shape \(7,\)|different numbers of rows"):
        engine.begin({"input_ids": ids[0], "attention_mask": mask[0]}).advance()
    for given in (ids, (ids, mask, mask), {"input_ids": ids}, {"ids": ids, "attention_mask": mask}):
        with pytest.raises(InputError, match="input_ids"):
            engine.begin(given).advance()
    with pytest.raises(ShapeError, match="different numbers of rows"):
        engine.begin((ids, mask[:1]))


@pytest.mark.parametrize("name", ["eager", "onnxruntime"])
def test_tokens_outside_of_the_vocabulary_are_named(name: str, make: Any, two: Any) -> None:
    x = two.texts()
    engine = make(name, two.TwoInputs().eval(), x)
    with pytest.raises(InputError, match=r"with numbers from \d+ to 2\d"):
        engine.begin({**x, "input_ids": x["input_ids"] + 10}).advance()


@pytest.mark.parametrize("name", ["eager", "generator"])
def test_rows_of_too_many_tokens_are_named(name: str) -> None:
    class Limited(MultiExit):
        num_exits, length = 1, 9

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(20, 4), nn.Parameter(torch.zeros(1, self.length, 4))

        def carry_size(self, exit: int) -> int:
            return 1

        def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
            (x,) = carry
            places = self.places[:, : x.shape[1]].expand(1, x.shape[1], 4)  # fails in longer rows
            return (), (self.words(x) + places).mean(1)

    class ByExits(Limited):
        def exits(self, x: Any) -> Iterator[Tensor]:
            yield self.stage(0, (x,))[1]

    engine = make_engine((Limited if name == "eager" else ByExits)().eval(), "eager")
    with pytest.raises(InputError, match=r"x of shape \(2, 80\), with numbers from 1 to 1\n  expected: .*in rows of at most"):
        engine.begin(torch.ones(2, 80, dtype=torch.int64)).advance()


@pytest.mark.parametrize("generator", [False, True])
def test_pixels_for_a_model_in_half_precision_are_refused_with_the_same_error(generator: bool) -> None:
    class ByExits(Images):
        def exits(self, x: Any) -> Iterator[Tensor]:
            yield from super().exits(x)

    model = (ByExits if generator else Images)().eval().half()
    with pytest.raises(DtypeError, match=r"x is torch.uint8\n  expected: floating-point"):
        make_engine(model, "eager").begin(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)).advance()


def test_an_error_of_the_model_itself_is_not_replaced(two: Any) -> None:
    class Broken(two.TwoInputs):  # type: ignore[misc, name-defined]
        def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
            raise ArithmeticError("of its own")

    with pytest.raises(ArithmeticError, match="of its own"):
        make_engine(Broken(), "eager").begin(two.texts()).advance()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["eager", "folded", "onnxruntime", "auto"])
def test_a_model_in_half_precision_gives_its_logits_within_its_rounding(name: str, dtype: torch.dtype) -> None:
    if name in ("onnxruntime", "auto"):
        pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    torch.manual_seed(0)
    model, x = MLP(MLPConfig(classes=5, exits=3)).eval().to(dtype), torch.randn(4, 2)
    with torch.no_grad():
        exact = list(model.float().exits(x))  # of the rounded weights
    model.to(dtype)
    for given in (x, x.to(dtype)):
        engine: Any = make_engine(model, name, example=given)
        ratio = difference(run_all(engine, given), exact)
        assert ratio < (0.02 if engine.name == "eager" or given.dtype == dtype else 1e-4)
        assert ("computes in float32, the model in" in engine.why) == (engine.name != "eager")
    assert next(model.parameters()).dtype == dtype


def test_a_model_in_half_precision_is_exported_in_float32(tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    torch.manual_seed(0)
    model, x = MLP(MLPConfig(classes=5, exits=3)).eval(), torch.randn(4, 2)
    with torch.no_grad():
        wanted = model(x).softmax(-1)
    loaded = load_exported(export(model.to(torch.bfloat16), tmp_path, rule="latest", example=x.bfloat16()))
    found = torch.stack([prediction.probs for prediction in loaded.run(x.bfloat16())])
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)
