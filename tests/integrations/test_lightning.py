"""Lightning's Trainer itself: metrics of every validation, and collected logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anytime
from anytime.errors import OptionError, ShapeError
from anytime.models import MLP, MLPConfig

lightning = pytest.importorskip("pytorch_lightning", reason="needs Lightning")
from anytime.integrations.lightning import CollectLogits, LogMetrics, read_step  # noqa: E402 - imports Lightning

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 6
LOADER = DataLoader(TensorDataset(X, Y), batch_size=8)


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = MLP(MLPConfig(classes=6, exits=3))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        x, y = batch
        return sum(F.cross_entropy(logits, y) for logits in self(x))  # type: ignore[return-value]

    def validation_step(self, batch: Any, number: int) -> dict[str, Tensor]:
        return {"logits": self(batch[0])}

    test_step = validation_step

    def predict_step(self, batch: Any, number: int) -> list[Tensor]:
        return list(self(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, *callbacks: Any) -> Any:
    return lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )


def expected(module: Module) -> Tensor:
    with torch.no_grad():
        return module.model(X)


def test_validation_logs_the_metrics_of_all_its_rows(tmp_path: Path) -> None:
    module, callback = Module(), LogMetrics(["latest", "product"])
    run = trainer(tmp_path, callback)
    run.fit(module, LOADER, LOADER)
    wanted = anytime.evaluate(expected(module), Y, rules=["latest", "product"], sets=None).rules
    assert callback.found["product"].learned == wanted["product"].learned
    assert run.callback_metrics["val/product/accuracy/exit_3"].item() == pytest.approx(wanted["product"].accuracy[2])
    assert not any("support_size" in name for name in run.callback_metrics)
    run.test(module, LOADER, verbose=False)
    assert "test/latest/ece/exit_1" in run.callback_metrics


def test_predictions_are_collected_in_order(tmp_path: Path) -> None:
    module, callback = Module().eval(), CollectLogits(tmp_path / "logits.npz")
    trainer(tmp_path, callback).predict(module, LOADER, return_predictions=False)
    assert callback.collected is not None
    torch.testing.assert_close(callback.collected.logits, expected(module))
    assert torch.equal(anytime.open_logits(tmp_path / "logits.npz").labels, Y)
    trainer(tmp_path, callback).validate(module, LOADER, verbose=False)
    assert callback.collected.logits.shape == (3, 50, 6)


def test_a_batch_with_as_many_rows_as_exits_is_collected(tmp_path: Path) -> None:
    module, callback = Module().eval(), CollectLogits()
    few = DataLoader(TensorDataset(X[:3], Y[:3]), batch_size=3)
    trainer(tmp_path, callback).predict(module, few, return_predictions=False)
    assert callback.collected is not None
    torch.testing.assert_close(callback.collected.logits, expected(module)[:, :3])


def test_a_lightning_module_is_a_model_for_collect_logits() -> None:
    module = Module()
    torch.testing.assert_close(anytime.collect_logits(module, LOADER).logits, expected(module))


def test_rows_of_an_interrupted_validation_do_not_count(tmp_path: Path) -> None:
    class Interrupted(Module):
        broken = True

        def validation_step(self, batch: Any, number: int) -> dict[str, Tensor]:
            if self.broken and number == 2:
                raise RuntimeError("interrupted")
            return super().validation_step(batch, number)

    module, callback = Interrupted(), LogMetrics("latest")
    run = trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="interrupted"):
        run.validate(module, LOADER, verbose=False)
    module.broken = False
    run.validate(module, LOADER, verbose=False)
    wanted = anytime.evaluate(expected(module), Y, rules="latest", sets=None).rules["latest"]
    assert callback.found["latest"].accuracy == pytest.approx(wanted.accuracy)


def test_mistakes_in_steps_are_explained() -> None:
    for outputs in (None, {"loss": X}):
        with pytest.raises(OptionError, match=r"return \{'logits'"):
            read_step(outputs, (X, Y))
    with pytest.raises(ShapeError, match=r"for 50 inputs"):
        read_step(torch.zeros(50, 3, 6), X)
    with pytest.raises(ShapeError, match="may be the loss"):
        read_step(torch.tensor(1.0), (X, Y))


def test_mistakes_in_the_arguments_are_found_before_the_run() -> None:
    with pytest.raises(OptionError, match="did you mean 'product'"):
        LogMetrics(["produkt"])
    with pytest.raises(OptionError, match="did you mean 'accuracy'"):
        LogMetrics(names=["acuracy"])
    with pytest.raises(OptionError, match="a list of metrics"):
        LogMetrics(names="accuracy")
