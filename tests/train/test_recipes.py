from __future__ import annotations

from pathlib import Path

import pytest

from anytime.errors import AnytimeError, OptionError
from anytime.models import create
from anytime.train.objectives.plan import phases
from anytime.train.run import _options
from anytime.train.settings import Source, read_recipe, read_settings, recipe_names, resolve

CLASSES = {
    "cifar10": 10, "cifar100": 100, "digits": 10, "imagenet": 1000, "tiny-imagenet": 200,
    "imdb": 2, "sst2": 2, "agnews": 4, "trec": 6, "banking77": 77, "clinc150": 150,
}  # fmt: skip
CPU = Source("test", {"device": "cpu", "root": "data"})


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_complete(name: str) -> None:
    config = resolve(read_recipe(name), CPU)
    assert config.about
    classes = CLASSES[config.data]
    network = create(config.model, classes=classes, **_options(config))
    phases(config.recipe, exits=network.num_exits, steps_per_epoch=1)
    if config.expected is not None:
        assert len(config.expected.accuracy) == network.num_exits


@pytest.mark.parametrize("name", recipe_names())
def test_settings_survive_a_file(name: str, tmp_path: Path) -> None:
    config = resolve(read_recipe(name), CPU)
    config.save(tmp_path / "config.yaml")
    assert resolve(read_settings(tmp_path / "config.yaml")) == config


def test_the_measured_recipe_is_the_one_that_was_measured() -> None:
    recipe = resolve(read_recipe("cifar100-msdnet"), CPU).recipe
    assert (recipe.epochs, recipe.batch, recipe.lr, recipe.warmup, recipe.weight_decay) == (270, 256, 0.4, 5, 1e-4)
    assert recipe.nesterov
    assert recipe.schedule == "cosine"


@pytest.mark.parametrize("change", [{"epochs": 10}, {"lr": 0.1}, {"options": {"exits": 3}}, {"held_out": 0}])
def test_a_changed_recipe_has_no_expected_accuracy(change: dict[str, object]) -> None:
    assert resolve(read_recipe("cifar100-msdnet"), CPU, Source("flags", change)).expected is None


def test_seed_and_hardware_keep_the_expected_accuracy() -> None:
    change = Source("flags", {"seed": 3, "device": "cpu", "evaluate_every": 1, "epochs": 270})
    assert resolve(read_recipe("cifar100-msdnet"), CPU, change).expected is not None


def test_a_short_run_has_a_short_warm_up() -> None:
    assert resolve(read_recipe("cifar100-msdnet"), CPU, Source("flags", {"epochs": 2})).recipe.warmup == 2


def test_an_exponent_is_read_as_a_number_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr: 1e-2\nmilestones: [5e-1]\nl2w: {meta_lr: 1e-3}\noptions: {reduction: 5e-1}\n")
    config = resolve(read_recipe("digits-msdnet"), read_settings(tmp_path / "a.yaml"))
    found = (config.recipe.lr, config.recipe.milestones, config.recipe.l2w.meta_lr, config.options["reduction"])
    assert found == (0.01, (0.5,), 0.001, 0.5)


def test_later_sources_win_and_another_device_has_its_own_settings() -> None:
    stored = Source("file", {"data": "digits", "model": "msdnet-cifar", "device": "cuda", "graph": True, "lr": 0.3})
    config = resolve(stored, Source("flags", {"device": "cpu", "lr": 0.2}))
    assert config.recipe.lr == 0.2
    assert not config.hardware.graph


def test_numbers_may_have_exponents(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: digits\nmodel: msdnet-cifar\nweight_decay: 1e-4\nlr: 4E-1\n")
    recipe = resolve(read_settings(tmp_path / "a.yaml"), CPU).recipe
    assert (recipe.weight_decay, recipe.lr) == (1e-4, 0.4)


@pytest.mark.parametrize(
    "expected", [{"accuracy": [0.5]}, {"accuracy": 0.5, "tolerance": 0.1}, [1], {"accuracy": [2], "tolerance": 0}]
)
def test_a_malformed_expected_accuracy_is_refused(expected: object) -> None:
    with pytest.raises(OptionError, match=r"flags: expected is"):
        resolve(read_recipe("digits-msdnet"), Source("flags", {"expected": expected}))


def test_the_second_stage_of_imta_starts_from_a_run_of_the_first(tmp_path: Path) -> None:
    from anytime.train.run import begin, train

    first, second = tmp_path / "first", tmp_path / "second"
    stage = {"epochs": 1, "device": "cpu"}
    one = resolve(read_recipe("digits-msdnet"), Source("test", {**stage, "objective": "equilibrium"}))
    train(begin(one, first), first)
    two = resolve(read_recipe("digits-msdnet"), Source("test", {**stage, "objective": "one-for-all", "init": str(first)}))
    assert train(begin(two, second), second).summary is not None
    for missing in (None, str(tmp_path / "nowhere")):
        bad = resolve(read_recipe("digits-msdnet"), Source("test", {**stage, "objective": "one-for-all", "init": missing}))
        with pytest.raises(AnytimeError, match=r"init|nowhere"):
            train(begin(bad, tmp_path / f"bad{missing is None}"), tmp_path / f"bad{missing is None}")


def test_cascading_heads_start_from_a_trained_backbone(tmp_path: Path) -> None:
    import torch

    from anytime.models import save
    from anytime.train import TrainConfig
    from anytime.train.start import start_network

    small = {"depth": 8, "width": 4, "at": ()}
    trained = create("resnet-cifar-20", classes=10, **small)
    save(trained, tmp_path / "run" / "model")
    options = {"depth": 8, "width": 4, "at": ("blocks.0.sum", "blocks.1.sum")}
    model = start_network("ztw-resnet-cifar-56", TrainConfig(), classes=10, init=tmp_path / "run", options=options)
    images = torch.randn(2, 3, 32, 32)
    trained.eval()
    model.eval()
    torch.testing.assert_close(model(images)[-1], trained(images)[-1])
    assert not any(p.requires_grad for p in model.backbone.parameters())  # type: ignore[union-attr]
