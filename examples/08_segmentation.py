"""Segmentation with exits: a small network for squares and discs in noise, evaluated pixel by pixel under three rules.

Logits are `(exits, images, classes, height, width)`; `class_dim` names the dimension of the classes, and pixels labelled 255
are left out.
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import anytime

SMALL = "--small" in sys.argv
SIZE, CLASSES, IGNORED = 32, 3, 255


class Segmenter(nn.Module):
    """Three stages of convolutions that see more and more around a pixel, each with a head."""

    num_exits = 3

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        inputs = ((3, 1), (width, 2), (width, 4))
        self.stages = nn.ModuleList(nn.Conv2d(size, width, 3, padding=reach, dilation=reach) for size, reach in inputs)
        self.heads = nn.ModuleList(nn.Conv2d(width, CLASSES, 1) for _ in inputs)

    def exits(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x).relu()
            yield head(x)


def scenes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of a disc over a square of the same colour, and the class of each pixel; outlines have no label."""
    steps = torch.arange(SIZE)
    labels = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for kind in (1, 2):
        x, y = (steps - torch.randint(6, SIZE - 6, (count, 1)) for _ in "xy")
        across, down = x[:, None, :].abs(), y[:, :, None].abs()
        distance = across.maximum(down) - 6.0 if kind == 1 else across.float().hypot(down.float()) - 6.0
        labels[distance < 0.5] = IGNORED
        labels[distance < -0.5] = kind
    return (labels > 0).float()[:, None] + 0.5 * torch.randn(count, 3, SIZE, SIZE), labels


torch.manual_seed(0)
model, (images, labels) = Segmenter(), scenes(256)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3 if SMALL else 20):
    for some in torch.randperm(len(images)).split(16):
        optimizer.zero_grad()
        sum(cross_entropy(now, labels[some], ignore_index=IGNORED) for now in model.exits(images[some])).backward()
        optimizer.step()

images, labels = scenes(128)
with torch.inference_mode():
    logits = torch.stack(list(model.eval().exits(images)))
found = anytime.evaluate(logits, labels, class_dim=2, ignore_index=IGNORED)
print(f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}\n{found.table()}")
for rule, metrics in found.rules.items():
    print(f"mean IoU at each exit, {rule}: " + ", ".join(f"{100 * value:.1f} %" for value in metrics.mean_iou))

with anytime.Runner(model, "caching", class_dim=1) as runner:
    for answer in runner.stream(images[:1]):
        right = (answer.labels == labels[:1])[labels[:1] != IGNORED].float().mean()
        print(f"exit {answer.exit}: {100 * right:.1f} % of the pixels of one image, after {1e3 * answer.elapsed:.1f} ms")
