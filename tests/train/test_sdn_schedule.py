from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch

from anytime.data import ImageData
from anytime.errors import OptionError
from anytime.train import ExitEvaluation, Hardware, TrainConfig, fit, joint_cross_entropy, on_logits
from anytime.train.data.rows import RowsStep
from anytime.train.schedule import default_sdn_weights, sdn_weights

PUBLISHED = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


def test_weights_grow_from_a_hundredth_to_their_final_value() -> None:
    assert default_sdn_weights(7) == pytest.approx(PUBLISHED)
    assert sdn_weights(0, epochs=100, final=PUBLISHED) == (*[0.01] * 6, 1.0)
    for epoch in (10, 57, 99):
        expected = [min(weight, 0.01 + epoch * weight / 100) for weight in PUBLISHED[:-1]]
        assert sdn_weights(epoch, epochs=100, final=PUBLISHED) == pytest.approx((*expected, 1.0))
    assert sdn_weights(99, epochs=100, final=PUBLISHED)[:-1] == pytest.approx(PUBLISHED[:-1])
    assert default_sdn_weights(1) == (1.0,)


def test_the_step_weighs_the_losses_of_each_epoch(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    plain = on_logits(joint_cross_entropy)
    for final, epoch in ((None, 1), ((0.2, 0.8, 2.0), 3)):
        config = TrainConfig(epochs=4, objective="sdn", exit_weights=final, augment=False)
        weighed = RowsStep(copy.deepcopy(model), digits["train"], plain, config, Hardware())
        rival = RowsStep(copy.deepcopy(model), digits["train"], plain, TrainConfig(epochs=4, augment=False), Hardware())
        for step in (weighed, rival):
            step.begin(epoch)
            step(0, 0.1)
        weights = sdn_weights(epoch, epochs=4, final=final or (0.45, 0.9, 1.0))
        torch.testing.assert_close(weighed.take_losses(), rival.take_losses() * torch.tensor(weights))


def test_every_exit_learns_the_digits(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    fit(model, digits["train"], TrainConfig(epochs=6, schedule="cosine", augment=False, objective="sdn"))
    assert min(ExitEvaluation(model, digits["test"]).accuracy()) > 0.85  # chance is 0.1


@pytest.mark.parametrize("hold", [False, True])
def test_heads_learn_on_a_frozen_backbone_whose_statistics_move_or_are_held(
    digits: dict[str, ImageData], tiny: ModuleType, hold: bool
) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    fit(model, digits["train"], TrainConfig(epochs=1, augment=False))
    before = copy.deepcopy(model.state_dict())
    model.heads.apply(lambda module: module.reset_parameters() if isinstance(module, torch.nn.Linear) else None)
    config = TrainConfig(epochs=3, schedule="cosine", augment=False, frozen=("stages",), hold_statistics=hold)
    fit(model, digits["train"], config)
    changed = {name for name, values in model.state_dict().items() if not torch.equal(values, before[name])}
    frozen = {name for name in changed if name.startswith("stages")}
    assert {name.split(".")[-1] for name in frozen} == (
        set() if hold else {"running_mean", "running_var", "num_batches_tracked"}
    )
    assert min(ExitEvaluation(model, digits["test"]).accuracy()) > 0.8  # chance is 0.1


def test_a_frozen_name_that_is_not_there_is_refused(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    with pytest.raises(OptionError, match=r"'stems'(.|\n)*stages, heads"):
        fit(tiny.Tiny(), digits["train"], TrainConfig(frozen=("stems",)))
    with pytest.raises(OptionError, match="frozen"):
        TrainConfig(frozen="stages")  # type: ignore[arg-type]
