"""Save a network of your own with its exits, calibration and policy; load it elsewhere and answer by a deadline.

The folder has weights and descriptions, and no code: whoever loads it passes the function that makes the bare network. On the
command line: `anytime predict digits-cnn input.npy --build my_module:make_backbone`.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import anytime
from anytime.data import load_digits, normalise
from anytime.policy import Confidence


def make_backbone() -> nn.Module:
    """A small CNN for digits of 8 × 8 pixels."""
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))


torch.manual_seed(0)
splits = load_digits()
mean, std = splits["train"].mean, splits["train"].std
inputs = {name: normalise(split.images, mean, std) for name, split in splits.items()}
labels = {name: split.labels for name, split in splits.items()}

model = anytime.attach_exits(make_backbone(), at=["1", "4"], example=inputs["train"][:2])
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(3 if "--small" in sys.argv else 20):
    for rows in torch.randperm(len(labels["train"])).split(64):
        optimizer.zero_grad()
        sum(cross_entropy(logits, labels["train"][rows]) for logits in model.exits(inputs["train"][rows])).backward()
        optimizer.step()
with torch.no_grad():
    held_out, test = model.eval()(inputs["val"]), model(inputs["test"])

folder = anytime.save(
    model,
    "digits-cnn",
    rule="product",
    calibration=anytime.fit_temperature(held_out, labels["val"]),
    policy=Confidence(0.95),  # inputs that are this certain stop early
    class_names=[f"digit {number}" for number in range(10)],
    normalisation=(mean, std),  # so that images can be given to the command line and the server
    metrics=anytime.evaluate(test, labels["test"]),  # for the README
)
print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")

with anytime.Runner.load(folder, build=make_backbone) as runner:  # with the rule, calibration and policy that were saved
    answer = runner.predict(inputs["test"], deadline="5s")
right = float((answer.labels == labels["test"]).double().mean())
print(f"{len(answer.labels)} digits: {right:.1%} right, after {torch.as_tensor(answer.exit).double().mean():.2f} of 3 exits")

again = anytime.load(folder, build=make_backbone)  # the network alone
with torch.no_grad():
    print(f"largest difference of its logits: {float((again(inputs['test']) - test).abs().max()):.1g}")
