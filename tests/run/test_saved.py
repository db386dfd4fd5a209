"""`anytime.save` and what reads its folders: the same model, the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.calibrate import fit_temperature
from anytime.conformal import fit_conformal_sets
from anytime.errors import FormatError, IntegrityError, MissingFileError, OptionError, OverwriteError
from anytime.models import (
    MLP,
    AttachedExits,
    AveragedEnsemble,
    Ensemble,
    ExitModel,
    IntervalMLP,
    MLPConfig,
    MultiExit,
    attach_cascade,
    create,
)
from anytime.policy import Confidence, PlainPolicy, fit_risk_control
from anytime.run import Profile, open_folder, profile_model
from anytime.run.engines import make_engine

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLAT = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 10
LOGITS = 2 * torch.randn(3, 60, 10, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(10)[LABELS]


def make_backbone(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def make_wider() -> nn.Module:
    wider = make_backbone()
    wider[3] = nn.Conv2d(9, 9, 3)
    return wider


class TiedHeads(MultiExit):
    """A model of a user's own: three stages, and one head that all exits share."""

    num_exits = 3

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(2 if stage == 0 else 6, 6) for stage in range(3))
        self.heads = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        for head in self.heads:
            head.weight = self.heads[0].weight
        self.register_buffer("scale", torch.full((1,), 0.5))

    def stage(self, exit: int, carry: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        x = self.stages[exit](carry[0]).relu() * self.scale
        return ((x,) if exit < 2 else ()), self.heads[exit](x)


class Yielding(nn.Module):
    """Research code with the protocol and nothing else: it is no MultiExit."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 4)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield (hidden := self.first(x))
        yield self.second(hidden)


class TokenHead(nn.Module):
    """A head of a user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((-1, -2)))  # type: ignore[no-any-return]


def make_head(shape: tuple[int, ...]) -> nn.Module:
    return TokenHead(shape[0])


def attach(**options: Any) -> AttachedExits:
    return anytime.attach_exits(make_backbone(), at=["2", "4"], example=X, **options)


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FLAT.shape[1], 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a + 2 * b)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], Any], Tensor, dict[str, Any]]] = {
    "a network of the library": (lambda: create("msdnet-cifar", classes=7, exits=2), torch.randn(2, 3, 32, 32), {}),
    "a residual network with cascading exits": (
        lambda: create("resnet-cifar-20", classes=3, image_size=8, at=(0.3, 0.6), heads="cascade", frozen=True),
        X,
        {},
    ),
    "attached exits": (attach, X, {"build": make_backbone}),
    "attached exits on a frozen module": (lambda: attach(frozen=True), X, {"build": make_backbone}),
    "attached exits in a thread": (lambda: attach(method="thread"), X, {"build": make_backbone}),
    "attached exits, built with their heads": (attach, X, {"build": attach}),
    "attached heads of one's own": (lambda: attach(head=make_head), X, {"build": make_backbone, "head": make_head}),
    "a cascade": (
        lambda: attach_cascade(make_backbone(), ["2", "4"], example=X, classes=10, normalise=False),
        X,
        {"build": make_backbone},
    ),
    "an ensemble of the library": (lambda: Ensemble([MLP(MLPConfig(classes=4)), MLP(MLPConfig(classes=4, width=9))]), FLAT, {}),
    "an ensemble of one architecture": (lambda: Ensemble([make_backbone(), make_backbone()]), X, {"build": make_backbone}),
    "an ensemble of several": (
        lambda: Ensemble([make_backbone(), make_backbone(5), create("resnet-cifar-20", classes=10, image_size=8)]),
        X,
        {"build": [make_backbone, lambda: make_backbone(5)]},
    ),
    "an ensemble of modules with two inputs": (
        lambda: Ensemble([Two(), Two()], example={"a": FLAT, "b": FLAT}),
        {"b": FLAT + 1, "a": FLAT},  # type: ignore[dict-item]
        {"build": Two},
    ),
    "an averaged ensemble with attached exits": (
        lambda: AveragedEnsemble([attach(), attach()]),
        X,
        {"build": make_backbone},
    ),
    "a MultiExit of one's own": (TiedHeads, FLAT, {"build": TiedHeads}),
    "a module with exits": (Yielding, FLAT, {"build": Yielding}),
    "a regression": (lambda: IntervalMLP(inputs=2), FLAT, {"build": lambda: IntervalMLP(inputs=2)}),
}


def outputs(model: Any, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return list(model.eval().exits(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    make, x, options = MODELS[name]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer += 0.25  # also what is not learned comes back
    folder = anytime.save(model, tmp_path / "model")
    assert {"config.json", "model.safetensors", "manifest.json", "README.md"} <= {path.name for path in folder.iterdir()}
    again = anytime.load(folder, **options)
    assert type(again) is type(model)
    assert not any(part.training for part in again.modules())
    assert [parameter.requires_grad for parameter in again.parameters()] == [
        parameter.requires_grad for parameter in model.parameters()
    ]
    for now, before in zip(outputs(again, x), outputs(model, x), strict=True):
        torch.testing.assert_close(now, before, rtol=1e-4, atol=1e-5)
    if isinstance(model, AttachedExits):
        assert (again.exit_names, again.method, again.staged) == (model.exit_names, model.method, model.staged)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = TiedHeads()
    folder = anytime.save(model, tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["tied"] == {
        "heads.1.weight": "heads.0.weight",
        "heads.2.weight": "heads.0.weight",
    }
    again = anytime.load(folder, build=TiedHeads)
    assert again.heads[2].weight is again.heads[0].weight
    apart = TiedHeads()
    apart.heads[1].weight = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(FormatError, match=r"heads\.0\.weight and heads\.1\.weight are one tensor in the file"):
        anytime.load(folder, build=lambda: apart)


def test_the_dtype_of_each_weight_is_kept(tmp_path: Path) -> None:
    model = attach().bfloat16()
    model.heads[0].float()
    folder = anytime.save(model, tmp_path / "model")
    again = anytime.load(folder, build=make_backbone)
    assert {name: tensor.dtype for name, tensor in again.state_dict().items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


def test_what_was_saved_answers_and_explicit_arguments_win(tmp_path: Path) -> None:
    model = attach()
    temperature, policy = (
        fit_temperature(LOGITS, LABELS),
        fit_risk_control(anytime.Product()(LOGITS), LABELS, loss="gap", epsilon=0.3),
    )
    profile = profile_model(make_engine(model, "folded", example=X[:1], threads=None), X[:1], repeats=2)
    folder = anytime.save(
        model,
        tmp_path / "model",
        rule="product",
        calibration=temperature,
        policy=policy,
        profile=profile,
        class_names=[f"kind {number}" for number in range(10)],
        normalisation=([0.5] * 3, [0.25] * 3),
    )
    opened = open_folder(folder, build=make_backbone)
    assert (opened.rule, opened.calibration[0].document()) == (anytime.Product(), temperature.document())
    assert opened.data is not None
    assert (opened.data.word(3), opened.data.std) == ("kind 3", (0.25, 0.25, 0.25))
    options = anytime.RunOptions(threads=None)
    with (
        anytime.Runner.load(folder, build=make_backbone, options=options) as loaded,
        anytime.Runner(model, "product", calibration=temperature, policy=policy, options=options) as direct,
        anytime.Runner.load(folder, build=make_backbone, options=options, rule="latest", policy=None, engine="eager") as other,
    ):
        assert loaded.engine.name == "folded"  # the profile's
        now, before = loaded.predict(X), direct.predict(X)
        torch.testing.assert_close(now.probs, before.probs, rtol=1e-3, atol=1e-4)
        assert torch.equal(torch.as_tensor(now.exit), torch.as_tensor(before.exit))
        assert other.engine.name == "eager"
        assert (type(other.rule).__name__, other.predict(X).exit) == ("Scaled", 3)  # temperatures fit any rule


def test_a_rule_leaves_out_what_was_fitted_for_another(tmp_path: Path) -> None:
    sets = fit_conformal_sets(LOGITS, LABELS, rule="product")
    folder = anytime.save(attach(), tmp_path / "model", calibration=sets)
    with anytime.Runner.load(folder, build=make_backbone) as runner:
        assert runner.predict(X).prediction_set is not None
    with anytime.Runner.load(folder, build=make_backbone, rule="latest") as runner:
        assert (runner.rule, runner.predict(X).prediction_set) == (anytime.Latest(), None)


def test_a_policy_that_was_fitted_for_another_rule_is_left_out(tmp_path: Path) -> None:
    policy = fit_risk_control(anytime.Product()(LOGITS), LABELS, loss="gap", epsilon=0.3)
    opened = open_folder(anytime.save(attach(), tmp_path / "fitted", rule="product", policy=policy), build=make_backbone)
    assert "policy" in opened.runner_arguments()
    assert "policy" in opened.runner_arguments(rule="product")
    assert "policy" not in opened.runner_arguments(rule="latest")
    assert "policy" not in opened.runner_arguments(calibration=fit_temperature(LOGITS, LABELS))
    plain = anytime.save(attach(), tmp_path / "plain", rule="product", policy=Confidence(0.5))
    assert "policy" in open_folder(plain, build=make_backbone).runner_arguments(rule="latest")


def test_a_policy_of_chosen_settings_is_saved(tmp_path: Path) -> None:
    folder = anytime.save(attach(), tmp_path / "model", policy=Confidence((0.5, 1.5, 0.0)))
    saved = anytime.load(folder / "policy.json")
    assert isinstance(saved, PlainPolicy)
    assert saved.policy == Confidence((0.5, 1.5, 0.0))

    class Own(Confidence):
        """A user's own."""

    with pytest.raises(OptionError, match="Own"):
        anytime.save(attach(), tmp_path / "other", policy=Own(0.5))
    assert not (tmp_path / "other").exists()


def test_a_profile_of_another_engine_is_left_out(tmp_path: Path) -> None:
    model = create("mlp-toy", classes=5)
    times = torch.rand(1, 5, 4)
    profile = Profile(5, 5, "onnxruntime", 1, {}, (1,), times, times.cumsum(1), 10)
    folder = anytime.save(model, tmp_path / "model", profile=profile)
    assert open_folder(folder).runner_arguments()["engine"] == "onnxruntime"
    assert "profile" not in open_folder(folder).runner_arguments(engine="eager")
    with anytime.Runner.load(folder, engine="eager") as runner:
        assert runner.predict(FLAT).exits == 5


def test_saving_again_replaces_the_model_and_what_it_no_longer_has(tmp_path: Path) -> None:
    folder = anytime.save(attach(), tmp_path / "model", rule="latest", policy=Confidence(0.5))
    anytime.save(attach(), folder)
    assert open_folder(folder, build=make_backbone).policy is None
    assert not (folder / "policy.json").exists()
    with pytest.raises(OverwriteError):
        anytime.save(attach(), folder, overwrite=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(OverwriteError):
        anytime.save(attach(), tmp_path / "mine")


def test_a_card_that_its_owner_changed_is_kept(tmp_path: Path) -> None:
    found = anytime.evaluate(LOGITS, LABELS)
    folder = anytime.save(attach(), tmp_path / "model", metrics=found)
    text = (folder / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: anytime-nn\n")
    assert f"| product | {' | '.join(f'{value:.3f}' for value in found.to_json()['rules']['product']['accuracy'])} |" in text
    (folder / "README.md").write_text("# Mine\n")
    anytime.save(attach(), folder)
    assert (folder / "README.md").read_text() == "# Mine\n"
    anytime.load(folder, build=make_backbone)  # a card is not part of the model


def test_inputs_and_classes_of_a_model_of_one_s_own_come_from_an_example(tmp_path: Path) -> None:
    opened = open_folder(anytime.save(Yielding(), tmp_path / "model", example=FLAT), build=Yielding)
    assert ([(spec.name, spec.shape) for spec in opened.inputs], opened.classes) == ([("", (2,))], 4)
    unknown = open_folder(anytime.save(Yielding(), tmp_path / "other"), build=Yielding)
    assert unknown.inputs == ()
    with pytest.raises(FormatError, match="example=x"):
        _ = unknown.classes


def test_the_default_rule_follows_the_classes_that_were_saved(tmp_path: Path) -> None:
    folder = anytime.save(Yielding(), tmp_path / "model", example=FLAT)  # four classes, which the module itself does not tell
    with anytime.Runner.load(folder, build=Yielding) as runner:
        assert runner.rule == anytime.Caching()
    with anytime.Runner.load(folder, build=Yielding, rule="latest") as runner:
        assert runner.rule == anytime.Latest()


def test_a_folder_of_another_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingFileError, match=r"has no model of this library.*\n.*\n.*attach_exits"):
        anytime.load(tmp_path)


def test_a_model_of_several_inputs_keeps_their_names(tmp_path: Path) -> None:
    class Two(nn.Module):
        """A module that takes two tensors by name."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.last(self.first(a) * b[..., :1])  # type: ignore[no-any-return]

    x = {"a": torch.randn(2, 3), "b": torch.tensor([[1, 0], [1, 1]])}
    model = anytime.attach_exits(Two(), at=["first"], example=x)
    again = anytime.load(anytime.save(model, tmp_path / "model"), build=Two)
    assert again.input_names == ("a", "b")
    torch.testing.assert_close(again(x), model.eval()(x))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_attached_hugging_face_models_need_no_build(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    words = {number: f"word {number}" for number in range(6)}
    config = BertConfig(**sizes, id2label=words, label2id={word: number for number, word in words.items()})
    config.name_or_path = "/home/me/secret"
    torch.manual_seed(0)
    x = {"input_ids": torch.randint(5, 50, (2, 7)), "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}
    model = anytime.attach_exits(BertForSequenceClassification(config).eval(), at=[0.4], example=x)
    folder = anytime.save(model, tmp_path / "model")
    assert "secret" not in "".join(path.read_text() for path in folder.glob("*.json"))
    opened = open_folder(folder)
    assert opened.data is not None
    assert opened.data.word(2) == "word 2"
    torch.testing.assert_close(opened.model(x), model(x), rtol=1e-4, atol=1e-5)
    assert opened.model.method == model.method
    described = json.loads((folder / "config.json").read_text())
    described["config"]["backbone"]["config"]["auto_class"] = "pipeline"
    rewrite(folder, described)
    with pytest.raises(FormatError, match="auto class"):
        anytime.load(folder)


def rewrite(folder: Path, config: Any) -> None:
    from anytime.artifacts import read_bundle, write_bundle

    write_bundle(folder, {**read_bundle(folder), "config.json": json.dumps(config).encode()}, kind="model")


def test_a_folder_of_another_network_names_the_first_difference(tmp_path: Path) -> None:
    folder = anytime.save(attach(), tmp_path / "model")
    for build, what in (
        (make_wider, r"3\.weight has shape \(8, 8, 3, 3\)"),
        (lambda: nn.Sequential(*make_backbone()[:5]), r"unknown: 7\.weight, 7\.bias|7\.bias, 7\.weight"),
        (lambda: anytime.attach_exits(make_backbone(), at=["2"], example=X), "at 2"),
    ):
        with pytest.raises(FormatError, match=what):
            anytime.load(folder, build=build)


def test_changed_files_are_refused_and_damaged_descriptions_explained(tmp_path: Path) -> None:
    folder = anytime.save(attach(), tmp_path / "model", rule="latest")
    config = json.loads((folder / "config.json").read_text())
    (folder / "runner.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"runner\.json"):
        anytime.load(folder, build=make_backbone)
    anytime.save(attach(), folder)
    for change in (
        {"config": {**config["config"], "at": ["nowhere"]}},
        {"config": {**config["config"], "backbone": {"architecture": "attached", "config": {}}}},
        {"config": {**config["config"], "heads": {"kind": "pickled"}}},
        {"inputs": [{"name": "", "dtype": "float32", "shape": [1 << 40], "fill": 0}]},
        {"inputs": [{"name": "", "dtype": "float32", "shape": [5], "fill": 0}]},
        {"classes": 11},
        {"tied": {"heads.0.pool.mix": "nothing"}},
        {"version": 3},
    ):
        rewrite(folder, {**config, **change})
        with pytest.raises(FormatError) as caught:
            anytime.load(folder, build=make_backbone)
        assert caught.value.fix


def test_every_folder_of_the_library_opens(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    from anytime.run.export import export

    model = create("mlp-toy", classes=5).eval()
    anytime.models.save(model, tmp_path / "run" / "model")
    export(model, tmp_path / "exported", rule="latest", example=FLAT)
    published = Path(__file__).parents[2] / "results" / "msdnet-cifar100-seed0"
    for folder in (tmp_path / "run" / "model", tmp_path / "run", tmp_path / "exported"):
        with anytime.Runner.load(folder) as runner:
            torch.testing.assert_close(runner.predict(FLAT).labels, runner.predict(FLAT).labels)
        with pytest.raises(OptionError, match="build"):
            anytime.load(folder, build=make_backbone)
    opened = open_folder(published)
    assert isinstance(opened.model, ExitModel)
    assert (opened.model.num_exits, opened.classes, opened.inputs[0].shape) == (7, 100, (3, 32, 32))
    with pytest.raises(FormatError, match="anytime evaluate"):
        anytime.load(published.parent / "dvit-cifar100-seed0")


def test_an_error_of_build_is_the_caller_s_own(tmp_path: Path) -> None:
    folder = anytime.save(attach(), tmp_path / "model")

    def broken() -> nn.Module:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        anytime.load(folder, build=broken)


def test_an_ensemble_takes_what_its_members_take(tmp_path: Path) -> None:
    members = [MLP(MLPConfig(classes=4)), MLP(MLPConfig(classes=4))]
    opened = open_folder(anytime.save(Ensemble(members), tmp_path / "model"))
    assert ([spec.shape for spec in opened.inputs], opened.classes) == ([(2,)], 4)
