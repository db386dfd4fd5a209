"""Make the model that `anytime serve` serves without a folder: `python tools/make_sample_model.py`, a minute on a CPU.

A ResNet with five exits, trained on the training split of scikit-learn's digits, with prediction sets fitted on the validation
split. Its accuracy on the test split is printed, one number per exit.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from anytime import conformal_sets, evaluate, samples
from anytime.artifacts import json_text, tensors_to_bytes, write_bundle
from anytime.conformal import Raps
from anytime.data import load_digits
from anytime.models.resnet import ResNet, ResNetConfig
from anytime.train.config import TrainConfig
from anytime.train.data.logits import ExitEvaluation
from anytime.train.data.named import doubled
from anytime.train.loop import fit

NETWORK = ResNetConfig(classes=10, depth=20, width=8, channels=1, image_size=16, at=(0.15, 0.35, 0.55, 0.75))
FOLDER = Path(samples.__file__).parent / "digits"


def main() -> None:
    """Train the network and write its folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = {name: doubled(part) for name, part in load_digits(channels=1, seed=0).items()}
    model = ResNet(NETWORK)
    fit(model, parts["train"], TrainConfig(epochs=20, batch=32, lr=0.02, schedule="cosine", augment=False, seed=0))
    model.eval()
    val, test = parts["val"], parts["test"]
    print(evaluate(ExitEvaluation(model, test).logits(), test.labels).rules["product"].accuracy)
    data = {"name": test.name, "mean": test.mean, "std": test.std, "class_names": test.class_names}
    config = {"version": 1, "architecture": "resnet", "config": asdict(NETWORK)}
    files = {
        "config.json": json_text(config).encode(),
        "model.safetensors": tensors_to_bytes(model.state_dict()),
        "data.json": json_text(data).encode(),
    }
    write_bundle(FOLDER, files, kind="model")
    sets = conformal_sets(ExitEvaluation(model, val).logits(), val.labels, raps=Raps(alpha=0.05))
    sets.save(FOLDER.parent / "digits-sets.json")


if __name__ == "__main__":
    main()
