"""The fused kernels against torch, on a GPU, or through Triton's interpreter where Triton is installed without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from anytime.errors import MissingExtraError
from anytime.train.gpu.fused import fuse_norms

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton's interpreter turns arrays of one element into numbers, which later releases of NumPy refuse.
INTERPRETED = HAS_TRITON and tuple(int(part) for part in np.__version__.split(".")[:2]) < (2, 4)

PROGRAM = """
import copy, torch
from torch import nn
from anytime.data import load_digits
from anytime.train import Hardware, TrainConfig, joint_cross_entropy, on_logits
from anytime.train.gpu.fused import BatchNormReLU
from anytime.train.step import TrainStep

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

def distance(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())

for shape, dtype, bound in (
    ((2, 6, 32, 32), torch.float32, 1e-5),
    ((3, 29, 5, 7), torch.float32, 1e-5),
    ((4, 128, 2, 2), torch.float32, 1e-5),
    ((7, 5, 1, 1), torch.float32, 1e-5),
    ((2, 12, 8, 8), torch.bfloat16, 1e-2),
):
    channels = shape[1]
    norm = nn.BatchNorm2d(channels).to(device)
    with torch.no_grad():
        norm.weight.uniform_(-1, 2), norm.bias.normal_(), norm.running_mean.normal_()
    rival = copy.deepcopy(norm).double()
    norm = BatchNormReLU(norm)
    x = (2 * torch.randn(shape, device=device) + 5).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact = x.detach().double().requires_grad_()
    out, expected = norm(x), torch.relu(rival(exact))
    wide = torch.randn(shape[0], channels + 4, *shape[2:], device=device).to(dtype)
    slope = wide.contiguous(memory_format=torch.channels_last)[:, 2:-2]
    ours = torch.autograd.grad(out, [x, norm.weight, norm.bias], slope)
    theirs = torch.autograd.grad(expected, [exact, rival.weight, rival.bias], slope.double())
    statistics = [(norm.running_mean, rival.running_mean), (norm.running_var, rival.running_var)]
    pairs = [(out, expected), *zip(ours, theirs), *statistics]
    assert all(distance(a, b) < bound for a, b in pairs), (shape, [distance(a, b) for a, b in pairs])

class Small(nn.Module):
    num_exits = 1
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    def exits(self, x):
        yield self.net(x)

model, losses = Small(), []
for fused in (False, True):
    hardware = Hardware(device=device, channels_last=True, fused=fused)
    step = TrainStep(copy.deepcopy(model), load_digits()["val"], on_logits(joint_cross_entropy), TrainConfig(batch=8), hardware)
    step.begin(0)
    for index in range(3):
        step(index, 0.1)
    losses.append(step.take_losses())
    step.publish(3)
    assert step.model.state_dict().keys() == model.state_dict().keys()
torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
"""


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or Triton with NumPy under 2.4")
def test_fused_kernels_agree_with_torch() -> None:
    environment = {**os.environ} if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment)


@pytest.mark.skipif(HAS_TRITON, reason="Triton is installed")
def test_without_triton_fusing_says_what_is_missing() -> None:
    with pytest.raises(MissingExtraError, match="triton"):
        fuse_norms(torch.nn.ReLU())
