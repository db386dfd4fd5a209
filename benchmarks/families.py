"""Exits attached to networks of other libraries: how each family runs, its costs, its ONNX files, and how exact it is.

    python benchmarks/families.py [NAME ...]

Prints a table in Markdown. All networks are small, have random weights and are made from a configuration, without downloads.
The rows of timm need timm 1.0.31, `pip install --no-deps timm`. Where torchvision is missing, the names of it that timm
imports, and that these networks do not use, are placeholders.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anytime import Budget, Runner
from anytime.checks import Inputs, map_inputs, tensors_of
from anytime.errors import AnytimeError, AttachWarning
from anytime.models import AttachedExits, attach_exits, measure_cost
from anytime.run.engines.onnx import Stage, make_session, onnx_bytes, stage_free_sizes

CLASSES = 5
TOKENS, MASK = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(0)), torch.ones(4, 16, dtype=torch.int64)
MASK[1, 11:] = 0
TEXT = {"input_ids": TOKENS.masked_fill(MASK == 0, 1), "attention_mask": MASK}
IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))

_SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
_BERT = {**_SMALL, "vocab_size": 100, "max_position_embeddings": 40, "pad_token_id": 1}
_DECODER = {**_BERT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 2, "eos_token_id": 2}
_VIT = {**_SMALL, "image_size": 64, "patch_size": 16}
_T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 4,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_CONV = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
_RESNET = {"hidden_sizes": [32, 64, 96, 128], "depths": [2, 2, 2, 2], "embedding_size": 16, "layer_type": "basic"}
_MOBILE = {"image_size": 64, "patch_size": 2, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 64]}

HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertForSequenceClassification", "BertConfig", _BERT),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", _BERT),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 100, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 40},
    ),
    "ALBERT": ("AlbertForSequenceClassification", "AlbertConfig", {**_BERT, "embedding_size": 16}),
    "ELECTRA": ("ElectraForSequenceClassification", "ElectraConfig", {**_BERT, "embedding_size": 16}),
    "DeBERTa-v2": (
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {
            **_BERT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
        },
    ),
    "ModernBERT": ("ModernBertForSequenceClassification", "ModernBertConfig", {**_BERT, "local_attention": 8}),
    "MPNet": ("MPNetForSequenceClassification", "MPNetConfig", _BERT),
    "GPT-2": (
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {"vocab_size": 100, "n_positions": 40, "n_embd": 32, "n_layer": 4, "n_head": 4, "pad_token_id": 1},
    ),
    "Llama": ("LlamaForSequenceClassification", "LlamaConfig", _DECODER),
    "Qwen2": ("Qwen2ForSequenceClassification", "Qwen2Config", _DECODER),
    "Qwen3": ("Qwen3ForSequenceClassification", "Qwen3Config", _DECODER),
    "Mistral": ("MistralForSequenceClassification", "MistralConfig", {**_DECODER, "sliding_window": 8}),
    "T5": ("T5ForSequenceClassification", "T5Config", {**_T5, "eos_token_id": 2}),
    "ViT": ("ViTForImageClassification", "ViTConfig", _VIT),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", _VIT),
    "Swin": ("SwinForImageClassification", "SwinConfig", _SWIN),
    "BEiT": ("BeitForImageClassification", "BeitConfig", {**_VIT, "use_relative_position_bias": True}),
    "ConvNeXt": ("ConvNextForImageClassification", "ConvNextConfig", {**_CONV, "image_size": 64}),
    "ResNet": ("ResNetForImageClassification", "ResNetConfig", _RESNET),
    "MobileViT": ("MobileViTForImageClassification", "MobileViTConfig", _MOBILE),
}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet": ("resnet18", {}),
    "EfficientNet": ("efficientnet_b0", {}),
    "MobileNetV3": ("mobilenetv3_small_050", {}),
    "ConvNeXt": ("convnext_atto", {}),
    "RegNet": ("regnetx_002", {}),
    "DenseNet": ("densenet121", {"growth_rate": 8, "block_config": (2, 2, 4, 2)}),
    "ViT": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 4}),
    "DeiT": ("deit_tiny_distilled_patch16_224", {"img_size": 64, "depth": 4}),
    "Swin": ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1)}),
    "MLP-Mixer": ("mixer_s32_224", {"img_size": 64}),
    "BEiT": ("beit_base_patch16_224", {"img_size": 64, "depth": 4, "embed_dim": 48, "num_heads": 4}),
    "EVA-02": ("eva02_tiny_patch14_224", {"img_size": 56, "depth": 4}),
    "MaxViT": ("maxvit_rmlp_pico_rw_256", {"img_size": 64}),
    "PoolFormer": ("poolformer_s12", {}),
}


@dataclass
class Row:
    """One line of the table.

    Attributes:
        family: The name of the family.
        method: `trace`, `replay` or `thread`, or why no exit could be attached.
        places: The places of the exits.
        costs: The MACs of the first exit and of all, in thousands.
        budget: Whether a `Runner` stops at each exit for a budget of its MACs.
        eager: The largest difference of the last exit to the module's own logits, relative to the largest of these.
        onnx: The same for ONNX Runtime, or why there are no files.
        why: Why this method.
    """

    family: str
    method: str = ""
    places: str = ""
    costs: str = ""
    budget: str = ""
    eager: str = ""
    onnx: str = ""
    why: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"| {self.family} | {self.method} | {self.places} | {self.costs} | {self.budget} | {self.eager} | {self.onnx} |"


def hugging_face(name: str) -> tuple[nn.Module, Inputs]:
    """A small random network of the package transformers, and inputs."""
    import transformers

    transformers.logging.set_verbosity_error()
    model, config, options = HUGGING_FACE[name]
    torch.manual_seed(0)
    made = stirred(getattr(transformers, model)(getattr(transformers, config)(num_labels=CLASSES, **options)))
    if made.main_input_name == "pixel_values":
        return made, IMAGES
    if name.startswith("T5"):
        tokens = TOKENS.clone()
        tokens[:, -1] = 2
        return made, {"input_ids": tokens, "attention_mask": torch.ones_like(MASK)}
    return made, TEXT


def timm_model(name: str) -> tuple[nn.Module, Inputs]:
    """A small random network of the package timm, and inputs."""
    with torchvision():
        import timm

    model, options = TIMM[name]
    torch.manual_seed(0)
    side = options.get("img_size", 64)
    return stirred(timm.create_model(model, num_classes=CLASSES, **options)), IMAGES[:, :, :side, :side]


@contextmanager
def torchvision() -> Iterator[None]:
    """Make `import timm` work where torchvision is not installed: every name of it is an empty class."""

    class Empty(ModuleType):
        __path__: ClassVar[list[str]] = []

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "InterpolationMode":
                return Enum(name, "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")
            return type(name, (nn.Module,), {})

    names = ["torchvision" + part for part in ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets")]
    missing = find_spec("torchvision") is None
    for name in names if missing else ():
        outer, _, inner = name.rpartition(".")
        sys.modules[name] = Empty(name)
        if outer:
            setattr(sys.modules[outer], inner, sys.modules[name])
    yield
    for name in names if missing else ():
        sys.modules.pop(name, None)


@torch.no_grad()
def stirred(module: nn.Module) -> nn.Module:
    """Noise on all weights: some families begin with layers of zeros, and then nothing before these would matter."""
    for parameter in module.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return module.eval()


def difference(one: Tensor, wanted: Tensor) -> str:
    return f"{((one - wanted).abs().max() / wanted.abs().max()).item():.1e}"


@torch.no_grad()
def onnx_logits(model: AttachedExits, x: Inputs) -> Tensor:
    """The logits of the last exit from one ONNX Runtime session per stage, exported with the first two rows of `x`."""
    carry = tensors_of(map_inputs(lambda tensor: tensor[:2], x), model.input_names)
    arrays = [tensor.numpy() for tensor in tensors_of(x, model.input_names)]
    for exit in range(model.num_exits):
        left, _ = model.stage(exit, carry)
        inputs, outputs = ([f"{kind}_{index}" for index in range(len(t))] for kind, t in (("carry", carry), ("left", left)))
        free = stage_free_sizes(model, exit, inputs, outputs)
        file = onnx_bytes(Stage(model, exit), carry, inputs=inputs, outputs=[*outputs, "logits"], free=free)
        session = make_session(file)
        *arrays, logits = session.run(None, dict(zip(inputs, arrays, strict=True)))
        carry = left
    return torch.from_numpy(logits)


@torch.no_grad()
def measure(family: str, make: Callable[[str], tuple[nn.Module, Inputs]], name: str) -> Row:
    module, x = make(name)
    row = Row(family)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttachWarning)
            model = attach_exits(module, at=[0.3, 0.6], example=x).eval()
    except AnytimeError as error:
        row.method = f"refused: {error.got}"
        return row
    row.method, row.why = model.method, model.why
    row.places = ", ".join(f"{fraction:.2f}" for fraction in model.exit_fractions)
    wanted = module(**x) if isinstance(x, Mapping) else module(x)
    wanted = getattr(wanted, "logits", wanted)
    row.eager = difference(model(x)[-1], wanted)
    try:
        macs = measure_cost(model, x).macs
        row.costs = f"{macs[0] / 1e3:,.0f} of {macs[-1] / 1e3:,.0f}"
        with Runner(model, example=x, macs=macs) as runner:
            exits = [runner.predict(x, budget=Budget(macs=cost)).exit for cost in macs]
        row.budget = "yes" if exits == list(range(1, model.num_exits + 1)) else f"stops at {exits}"
    except AnytimeError as error:
        row.budget = error.got
    try:
        row.onnx = difference(onnx_logits(model, x), wanted) if model.staged else "no stages"
    except AnytimeError as error:
        row.onnx = error.got
    return row


def main() -> None:
    chosen = sys.argv[1:]
    print("| family | method | exits at | thousand MACs | budget of MACs | difference | in ONNX |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    reasons = []
    for library, make, names in (("transformers", hugging_face, HUGGING_FACE), ("timm", timm_model, TIMM)):
        for name in names:
            if not chosen or name in chosen:
                row = measure(f"{name} ({library})", make, name)
                print(row, flush=True)
                reasons.append(f"{row.family}: {row.why}")
    print(*reasons, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
