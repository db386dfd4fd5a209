"""Last-layer Laplace with the package laplace-torch in place of this library's own closed form, to compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.calibrate.laplace.curvature import Curvature, Diagonal, Full, Kron, Structure, check_structure, eigen
from anytime.calibrate.laplace.last_layer import Head, Layer, check_batch, check_layers, check_total
from anytime.calibrate.laplace.posterior import LastLayerLaplace, Method, Prior, check_prior, check_tuning, chooser
from anytime.errors import MissingExtraError


def laplace_torch(
    features: Sequence[Any],
    labels: Any,
    layers: Sequence[Layer],
    *,
    prior_precision: Prior = "evidence",
    structure: Structure = "kron",
    tuning_features: Sequence[Any] | None = None,
    tuning_labels: Any = None,
    method: Method = "probit",
) -> LastLayerLaplace:
    """As `fit_laplace`, with the curvature that laplace-torch finds; λ is chosen as there.

    The package takes weight and bias for independent in its Kronecker form: the factor of the features has no entries
    between the two. `full` and `diag` are the same as in `fit_laplace`, and so is `kron` without a bias.

    Args:
        features: What the last layer of each exit reads, `(rows, features)` an exit.
        labels: `(rows,)`.
        layers: The last layers, or pairs of weight and bias (or None).
        prior_precision: λ, `evidence` or `grid`.
        structure: `kron`, `full` or `diag`.
        tuning_features: Rows that were not trained on, for `grid`.
        tuning_labels: Their labels.
        method: The predictions that `grid` chooses for.
    """
    try:
        package: Any = import_module("laplace")
    except ImportError as error:
        raise MissingExtraError(
            f"laplace-torch cannot be imported: {error}",
            expected="the package laplace-torch and what it imports",
            fix="use fit_laplace, which needs no package; docs/laplace.md says how to install it without torchvision",
        ) from error
    check_structure(structure)
    check_prior(prior_precision, method)
    heads = check_layers(layers)
    tuning = check_tuning(heads, features, labels, tuning_features, tuning_labels)
    phis, wanted = check_batch(features, labels, heads)
    rows = check_total(None, len(wanted))
    curvatures, likelihoods = [], []
    for head, phi in zip(heads, phis, strict=True):
        data = torch.utils.data.TensorDataset(phi[:, : head.features].double(), wanted)
        with torch.enable_grad():
            found = package.Laplace(_layer(head), "classification", subset_of_weights="all", hessian_structure=structure)
            # In one batch: of several, the package would add up the Kronecker factors.
            found.fit(torch.utils.data.DataLoader(data, batch_size=rows))
        curvatures.append(_curvature(found.H, head, structure))
        likelihoods.append(float(found.log_likelihood))
    choose = chooser(prior_precision, tuning, method)
    return LastLayerLaplace.around(heads, curvatures, likelihoods, structure=structure, rows=rows, choose=choose)


def _layer(head: Head) -> nn.Linear:
    layer = nn.Linear(head.features, len(head.weights), bias=head.biased, dtype=torch.float64, device=head.weights.device)
    with torch.no_grad():
        layer.weight.copy_(head.weights[:, : head.features])
        if head.biased:
            layer.bias.copy_(head.weights[:, -1])
    return layer


def _curvature(found: Any, head: Head, structure: Structure) -> Curvature:
    """Theirs in the order of ours: theirs has all weights before all biases."""
    classes, width = head.weights.shape
    if structure == "kron":
        return _kron(found, head)
    order = _order(head)
    if structure == "diag":
        return Diagonal(found.detach()[order].view(classes, width))
    return Full(*eigen(found.detach()[order][:, order]))


def _kron(found: Any, head: Head) -> Kron:
    (outputs, inputs), (output_basis, input_basis) = found.eigenvalues[0], found.eigenvectors[0]
    if head.biased:
        # A bias is a feature of 1 that is independent of the others: its share of the factor is its eigenvalue over theirs.
        share = found.eigenvalues[1][0].sum() / outputs.sum()
        inputs = torch.cat((inputs, share[None]))
        input_basis = F.pad(input_basis, (0, 1, 0, 1))
        input_basis[-1, -1] = 1
    return Kron(inputs.detach(), input_basis.detach(), outputs.detach(), output_basis.detach())


def _order(head: Head) -> Tensor:
    """Where each weight of ours, by class and then by feature, stands in theirs."""
    classes, features = len(head.weights), head.features
    places = torch.arange(classes * features).view(classes, features)
    if head.biased:
        places = torch.cat((places, classes * features + torch.arange(classes)[:, None]), 1)
    return places.flatten().to(head.weights.device)
