"""Research code that returns a list of logits (BranchyNet, SDN, MSDNet ports): metrics first, then answers by a deadline.

The losses take the list as it is. `from_outputs` makes it a model with exits; as a list of stages it also stops early.
"""

import sys

import torch
from torch import nn

import anytime
from anytime.data import load_digits
from anytime.models import from_outputs
from anytime.train import joint_cross_entropy


class BranchyNet(nn.Module):
    """Blocks with a classifier after each; forward returns the logits of all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = [(1, width, 4), (width, width, 2), (width, width, 1)]  # channels in and out, and the size of the maps
        blocks = ([nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)] for a, b, _ in shapes)
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in blocks)
        self.heads = nn.ModuleList(nn.Sequential(nn.Flatten(), nn.Linear(b * size * size, 10)) for _, b, size in shapes)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        logits = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            logits.append(head(x))
        return logits


small = "--small" in sys.argv
torch.manual_seed(0)
train, _, test = ((part.images / 255.0, part.labels) for part in load_digits().values())
net = BranchyNet(16 if small else 64)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(5 if small else 30):
    for rows in torch.randperm(len(train[0])).split(64):
        optimizer.zero_grad()
        joint_cross_entropy(net(train[0][rows]), train[1][rows]).sum().backward()
        optimizer.step()

# All outputs at once: whatever needs logits works, but every answer costs all exits.
model = from_outputs(net.eval(), example=test[0][:2])
print("a list:", model.extra_repr())
for name, metrics in anytime.evaluate(anytime.collect_logits(model, [test])).rules.items():
    drops = metrics.final_drop_percent["0.1"]
    print(f"{name:8} accuracy", *(f"{value:.3f}" for value in metrics.accuracy or ()), f"drops of 0.1: {drops:.1f} %")

# The same network as stages, (block, classifier): it stops early, and runs on every engine.
stages = from_outputs(list(zip(net.blocks, net.heads, strict=True)))
with anytime.Runner(stages, engine="auto", example=test[0][:1]) as runner:
    early = runner.predict(test[0][:1], budget=anytime.Budget(exits=1))
    in_time = runner.predict(test[0][:1], deadline="50ms")
    for answer in (early, in_time):
        print(f"exit {answer.exit} of {answer.exits}: {answer.label}, confidence {answer.confidence.item():.2f} ({test[1][0]})")
