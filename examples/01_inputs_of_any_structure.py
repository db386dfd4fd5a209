"""A model that takes a dict of tensors: an answer by a deadline, many callers at once, and the same from exported stages.

Inputs are the token ids and the attention mask of texts, as Hugging Face's models take them. The weights are random.
"""

# Needs: onnx, onnxruntime

import argparse
import asyncio
import tempfile

import torch
from torch import Tensor, nn

import anytime
from anytime.run.export import export


class Block(nn.Module):
    """Mixes each token with the mean of the real ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return x + self.layers(x + (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True))


class Texts(nn.Module):
    """A classifier of texts without exits."""

    def __init__(self, words: int = 1000, width: int = 64, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, classes)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = self.words(input_ids), attention_mask[..., None]
        for block in self.blocks:
            x = block(x, real)
        return self.head((x * real).sum(1) / real.sum(1))


def texts(rows: int, length: int) -> dict[str, Tensor]:
    """Random texts of at most this length, padded to it."""
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))
    return {"input_ids": torch.randint(1000, (rows, length)), "attention_mask": mask.long()}


async def ask(runner: anytime.Runner, callers: int) -> list[anytime.Answer]:
    """Texts of three lengths at once: those of the same length share batches."""
    return await asyncio.gather(*(runner.predict_async(texts(1, 8 * (1 + each % 3)), deadline="5s") for each in range(callers)))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--small", action="store_true", help="fewer callers")
callers = 30 if parser.parse_args().small else 300
torch.manual_seed(0)
example = texts(1, 16)
model = anytime.attach_exits(Texts().eval(), at=["blocks.1", "blocks.3"], example=example)

with anytime.Runner(model, "latest", engine="onnxruntime", example=example) as runner:
    runner.warm_up(example)
    answer = runner.predict(texts(4, 16), deadline="5s")
    print(f"labels {answer.labels.tolist()} at exit {answer.exit} of {answer.exits} after {1e3 * answer.elapsed:.1f} ms")
    batches: list[int] = []
    runner.on_stage = lambda report: batches.append(report.requests)
    answers = asyncio.run(ask(runner, callers))
    print(f"{len(answers)} callers were answered by {len(batches)} stages, of up to {max(batches)} requests each")

with tempfile.TemporaryDirectory() as folder:
    export(model, folder, rule="latest", example=example, progress=lambda done, total: print(f"exported {done} of {total}"))
    with anytime.Runner.load(folder) as loaded:
        inputs = texts(2, 12)
        same = torch.allclose(loaded.predict(inputs, deadline="5s").probs, model(inputs)[-1].softmax(-1), atol=1e-4)
        print(f"the stages take {' and '.join(loaded.engine.input_names)}, and answer as the model: {same}")
