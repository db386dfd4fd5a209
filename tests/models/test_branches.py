"""Parallel CUDA streams: results do not change, and the paths really leave the main stream."""

from __future__ import annotations

import pytest
import torch

from anytime.models import MLP, MLPConfig, create
from anytime.models.branches import run_paths_side_by_side

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_cuda
def test_paths_run_on_several_streams_and_give_the_same_logits_and_gradients() -> None:
    torch.manual_seed(0)
    model = create("msdnet-cifar-linear", classes=10).cuda()
    images = torch.randn(4, 3, 32, 32, device="cuda")
    model(images)[-1].sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    with torch.no_grad():
        before = model.eval()(images)
    run_paths_side_by_side(model)
    streams = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda *_: streams.add(torch.cuda.current_stream().cuda_stream))
    with torch.no_grad():
        torch.testing.assert_close(model(images), before)
    assert len(streams) > 2
    model.train()(images)[-1].sum().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_other_networks_are_not_changed() -> None:
    model = MLP(MLPConfig(classes=4))
    run_paths_side_by_side(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
