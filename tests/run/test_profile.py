from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anytime.errors import DeadlineTooShort, FormatError, OptionError, ShapeError
from anytime.models import MLP, MLPConfig
from anytime.run import Profile, Runner, RunOptions, profile_model
from anytime.run.timing.profile import describe_machine


@pytest.fixture
def engine(fakes: Any, logits: Tensor) -> Any:
    return fakes.FakeEngine(logits, [0.1, 0.2, 0.3, 0.4, 0.5], fakes.FakeClock())


def test_a_profile_has_the_times_of_the_stages(engine: Any) -> None:
    profile = profile_model(engine, engine.rows, batch_sizes=(3, 1), repeats=4, clock=engine.clock, macs=range(1, 6))
    assert profile.batch_sizes == (1, 3)
    assert profile.stage_seconds.shape == profile.exit_seconds.shape == (2, 5, 4)
    torch.testing.assert_close(profile.stage_seconds[1, :, 0], torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64))
    assert profile.seconds(3, quantile=0.99) == pytest.approx((0.1, 0.3, 0.6, 1.0, 1.5))
    assert (profile.engine, profile.threads, profile.classes, profile.repeats) == ("fake", 1, 4, 4)
    assert engine.open == 0


def test_a_profile_survives_a_file(engine: Any, tmp_path: Path) -> None:
    profile = profile_model(engine, engine.rows, repeats=2, clock=engine.clock)
    again = Profile.load(profile.save(tmp_path / "profile.json"))
    assert again.stage_seconds.equal(profile.stage_seconds)
    assert again.machine == profile.machine
    assert again.seconds() == profile.seconds()


def test_a_runner_starts_with_a_profile(engine: Any, tmp_path: Path) -> None:
    profile = profile_model(engine, engine.rows, batch_sizes=(6,), repeats=2, clock=engine.clock, macs=range(1, 6))
    path = profile.save(tmp_path / "profile.json")
    for given in (profile, path, str(path)):
        with Runner(engine, "latest", engine, profile=given, options=RunOptions(clock=engine.clock)) as runner:
            with pytest.raises(DeadlineTooShort) as error:
                runner.predict(engine.rows, deadline=0.05)
            assert error.value.forecast == pytest.approx(0.1)
            answer = list(runner.stream(engine.rows, deadline=0.7))[-1]
        assert (answer.exit, answer.macs) == (3, 3)


def test_a_profile_of_something_else_is_refused(engine: Any, fakes: Any, logits: Tensor, tmp_path: Path) -> None:
    profile = profile_model(engine, engine.rows, repeats=1, clock=engine.clock)
    other = fakes.FakeEngine(logits[:3])
    with pytest.raises(ShapeError, match="exits"):
        Runner(other, "latest", other, profile=profile)
    other = fakes.FakeEngine(logits)
    other.name = "another"
    with pytest.raises(OptionError, match="engine"):
        Runner(other, "latest", other, profile=profile)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(FormatError):
        Runner(engine, "latest", engine, profile=tmp_path / "broken.json")


@pytest.mark.parametrize("options", [{"batch_sizes": ()}, {"batch_sizes": (0,)}, {"repeats": 0}, {"repeats": True}])
def test_invalid_arguments_are_refused(engine: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        profile_model(engine, engine.rows, clock=engine.clock, **options)
    with pytest.raises(OptionError, match="batch size"):
        profile_model(engine, engine.rows, repeats=1, clock=engine.clock).seconds(64)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["torch"] == torch.__version__
    assert machine["processor"]


def test_an_older_profile_is_read_with_its_macs(engine: Any, tmp_path: Path) -> None:
    profile = profile_model(engine, engine.rows, repeats=2, clock=engine.clock, macs=range(1, 6))
    document = profile.document()
    document["fields"]["costs"] = document["fields"].pop("macs")
    del document["sha256"]
    document["sha256"] = hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (tmp_path / "profile.json").write_text(json.dumps(document))
    assert Profile.load(tmp_path / "profile.json").macs == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert "macs" in profile.document()["fields"]


def test_a_model_is_profiled_in_the_eager_engine() -> None:
    profile = profile_model(MLP(MLPConfig(classes=3, exits=2)), torch.zeros(1, 2), repeats=1)
    assert (profile.engine, profile.exits, profile.classes) == ("eager", 2, 3)
    with pytest.raises(OptionError, match="Linear"):
        profile_model(torch.nn.Linear(2, 3), torch.zeros(1, 2), repeats=1)  # type: ignore[arg-type]
