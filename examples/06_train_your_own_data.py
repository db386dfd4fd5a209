"""Train exits on your own data: heads on a frozen backbone, then everything together, and stop early with a guarantee.

python examples/06_train_your_own_data.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import anytime
from anytime.train import EpochLog


def make_backbone() -> nn.Module:
    """A convolutional network as you have one: it returns logits, and knows nothing of exits."""

    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    blocks = block(1, 16), block(16, 16), block(16, 32), nn.MaxPool2d(2), block(32, 32), block(32, 64)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def show(line: EpochLog) -> None:
    """One line per epoch, with the accuracy of each exit."""
    print(
        f"  epoch {line.epoch}: loss {sum(line.losses):.3f}, accuracy", *(f"{value:.3f}" for value in line.val_accuracy or ())
    )


def main(small: bool) -> None:
    """Train, fit a policy, and look at what stopping early costs on images that were used for neither."""
    epochs = 4 if small else 12
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    train, held_out, test = random_split(data, [997, 400, 400], torch.Generator().manual_seed(0))
    loader = DataLoader(train, batch_size=64, shuffle=True)
    x, _ = next(iter(loader))
    torch.manual_seed(0)
    model = anytime.attach_exits(make_backbone(), at=[0.25, 0.5, 0.75], example=x)
    print("exits and backbone together, with the likelihood of the product")
    anytime.fit(model, loader, val=test, epochs=epochs, lr=3e-3, objective="joint-then-product", on_epoch=show)

    # With a trained backbone, frozen=True trains new heads and leaves everything else as it is.
    frozen = anytime.attach_exits(model.backbone, at=[0.25, 0.5, 0.75], example=x, frozen=True)
    print("new heads on the same backbone, frozen")
    anytime.fit(frozen, loader, val=test, epochs=2, on_epoch=show)

    policy = anytime.fit_stopping(frozen, held_out, loss=0.01)
    print(policy.guarantee)
    x, y = next(iter(DataLoader(test, batch_size=len(test))))
    for name, chosen in (("stopping early", policy), ("all exits", None)):
        with anytime.Runner(frozen, policy=chosen) as runner:
            print(f"{name}: accuracy {(runner.predict(x).labels == y).double().mean():.3f}")
    print(f"mean exit with the policy: {policy.mean_exit:.2f} of {policy.exits}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="fewer epochs, for a quick look")
    main(parser.parse_args().small)
