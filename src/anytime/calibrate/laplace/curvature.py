"""The curvature of a linear head under the softmax likelihood, and the covariance of the logits that follows from it.

For features φ (with a 1 appended for the bias) the generalised Gauss–Newton matrix of the weights is Σ Λ ⊗ φφᵀ with
Λ = diag p - ppᵀ, independent of the labels. It is summed over blocks of rows in float64 and kept in one of three structures:
`full` as it is, `kron` as the product of Σ φφᵀ and the mean of Λ, `diag` as its diagonal. With a prior of precision λ the
logits of an input have covariance S = (I ⊗ φᵀ)(curvature + λI)⁻¹(I ⊗ φ).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from anytime.checks import check_choice, check_seed
from anytime.errors import OptionError, ShapeError

Structure = Literal["kron", "full", "diag"]

_BLOCK = 1 << 22
"""Numbers per block: 32 MiB in float64."""
_LARGEST_FULL = 4096


class Curvature(ABC):
    """A decomposed curvature; subclasses are frozen dataclasses of tensors."""

    @property
    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """All of them, one per weight, in any shape."""

    @abstractmethod
    def variances(self, features: Tensor, prior: float) -> Tensor:
        """The diagonal of S, `(rows, classes)`, for features with a 1 appended."""

    @abstractmethod
    def noise(self, features: Tensor, prior: float, draws: Tensor) -> Tensor:
        """S^½ z, `(rows, samples, classes)`, for normal z, `(samples, classes)`; S^½ is symmetric, so it is unique."""

    @staticmethod
    @abstractmethod
    def shapes(classes: int, width: int) -> list[tuple[int, ...]]:
        """The shapes of its tensors for a head with these classes and features."""

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, in float32 on the CPU, to be stored."""
        return {field.name: getattr(self, field.name).float().cpu() for field in fields(self)}  # type: ignore[arg-type]

    def like(self, features: Tensor) -> Self:
        """With the dtype and device of the features."""
        return type(self)(**{field.name: getattr(self, field.name).to(features) for field in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Kron(Curvature):
    """Q_g diag(g) Q_gᵀ ⊗ Q_a diag(a) Q_aᵀ: g and Q_g belong to the outputs, a and Q_a to the inputs."""

    inputs: Tensor
    input_basis: Tensor
    outputs: Tensor
    output_basis: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        return self.outputs[:, None] * self.inputs

    def variances(self, features: Tensor, prior: float) -> Tensor:
        return self._spread(features, prior) @ self.output_basis.square().mT

    def noise(self, features: Tensor, prior: float, draws: Tensor) -> Tensor:
        turned = draws @ self.output_basis
        return (self._spread(features, prior).sqrt()[:, None] * turned) @ self.output_basis.mT

    @staticmethod
    def shapes(classes: int, width: int) -> list[tuple[int, ...]]:
        return [(width,), (width, width), (classes,), (classes, classes)]

    def _spread(self, features: Tensor, prior: float) -> Tensor:
        """The eigenvalues of S, `(rows, classes)`: Σ_j u_j²/(g_i a_j + λ) with u = Q_aᵀφ."""
        return (features @ self.input_basis).square() @ (self.eigenvalues + prior).reciprocal().mT


@dataclass(frozen=True, eq=False)
class Full(Curvature):
    """The whole matrix by its eigenvalues and eigenvectors; weights are ordered by class, then by feature."""

    values: Tensor
    basis: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        return self.values

    def variances(self, features: Tensor, prior: float) -> Tensor:
        return self.covariances(features, prior).diagonal(dim1=1, dim2=2)

    def noise(self, features: Tensor, prior: float, draws: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.covariances(features, prior))
        root = (vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.mT
        noise: Tensor = draws @ root
        return noise

    @staticmethod
    def shapes(classes: int, width: int) -> list[tuple[int, ...]]:
        return [(classes * width,), (classes * width, classes * width)]

    def covariances(self, features: Tensor, prior: float) -> Tensor:
        """S, `(rows, classes, classes)`."""
        weights, width = len(self.values), features.shape[1]
        blocks = self.basis.view(weights // width, width, weights)
        turned = torch.einsum("nj,kjp->nkp", features, blocks) * (self.values + prior).rsqrt()
        covariances: Tensor = turned @ turned.mT
        return covariances


@dataclass(frozen=True, eq=False)
class Diagonal(Curvature):
    """The diagonal alone, `(classes, width)`."""

    values: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        return self.values

    def variances(self, features: Tensor, prior: float) -> Tensor:
        return features.square() @ (self.values + prior).reciprocal().mT

    def noise(self, features: Tensor, prior: float, draws: Tensor) -> Tensor:
        return self.variances(features, prior).sqrt()[:, None] * draws

    @staticmethod
    def shapes(classes: int, width: int) -> list[tuple[int, ...]]:
        return [(classes, width)]


class Sums:
    """Sums over the rows for the curvature of one head, block by block.

    Args:
        weights: Of the head, `(classes, width)`, the bias as the last column if there is one.
        structure: `kron` needs 8 (classes² + width²) bytes, `full` 8 (classes · width)².
    """

    def __init__(self, weights: Tensor, structure: Structure) -> None:
        check_choice(structure, "structure", get_args(Structure))
        self.weights = weights.detach().double()
        self.structure = structure
        self.rows = 0
        self.log_likelihood = 0.0
        classes, width = weights.shape
        if structure == "full" and classes * width > _LARGEST_FULL:
            raise OptionError(
                f"the full matrix of {classes} classes and {width} features has {classes * width} rows",
                expected=f"at most {_LARGEST_FULL}",
                fix="pass structure='kron'",
            )
        shapes: dict[str, list[tuple[int, ...]]] = {
            "kron": [(width, width), (classes, classes)],
            "full": [(classes, width, classes, width)],
            "diag": [(classes, width)],
        }
        self._sums = [self.weights.new_zeros(shape) for shape in shapes[structure]]

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add rows: features with a 1 appended, `(rows, width)`, and labels, `(rows,)`."""
        classes, width = self.weights.shape
        for picked in blocks(len(features), row_size(self.structure == "full", classes, width)):
            phi = features[picked].detach().double()
            log_probs = (phi @ self.weights.mT).log_softmax(-1)
            self.rows += len(phi)
            self.log_likelihood += float(log_probs.gather(1, labels[picked, None]).sum())
            self._add(phi, log_probs.exp())

    def curvature(self, rows: int | None = None) -> Curvature:
        """The curvature of the rows seen, scaled to `rows` if given."""
        scale = (rows or self.rows) / self.rows
        match self.structure, self._sums:
            case "kron", [inputs, outputs]:
                return Kron(*eigen(scale * inputs), *eigen(outputs / self.rows))
            case "full", [whole]:
                return Full(*eigen(scale * whole.flatten(2).flatten(0, 1)))
        return Diagonal(scale * self._sums[0])

    def _add(self, phi: Tensor, probs: Tensor) -> None:
        match self.structure, self._sums:
            case "kron", [inputs, outputs]:
                inputs += phi.mT @ phi
                outputs += probs.sum(0).diag() - probs.mT @ probs
            case "full", [whole]:
                spread = probs.diag_embed() - probs[:, :, None] * probs[:, None]
                whole += torch.einsum("nkl,ni,nj->kilj", spread, phi, phi)
            case "diag", [diagonal]:
                diagonal += (probs * (1 - probs)).mT @ phi.square()


_CURVATURES: Mapping[Structure, type[Curvature]] = MappingProxyType({"kron": Kron, "full": Full, "diag": Diagonal})


def stored_curvature(structure: Structure, tensors: Mapping[str, Tensor], *, classes: int, width: int) -> Curvature:
    """The curvature stored by `tensors()`; an error if structure or shapes do not match."""
    check_choice(structure, "structure", get_args(Structure))
    kind = _CURVATURES[structure]
    wanted = dict(zip((field.name for field in fields(kind)), kind.shapes(classes, width), strict=True))  # type: ignore[arg-type]
    found = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in tensors.items()}
    if found != wanted:
        raise ShapeError(f"the curvature has the shapes {found}", expected=f"{wanted}", fix="fit it again")
    return kind(**tensors)


def draw(samples: int, classes: int, *, seed: int, like: Tensor) -> Tensor:
    """Standard normal numbers, `(samples, classes)`; shared by all inputs, so a prediction does not depend on its batch."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    return torch.randn(samples, classes, generator=generator).to(like)


def log_mean_softmax(logits: Tensor) -> Tensor:
    """The logarithm of the mean softmax over samples, `(rows, classes)` from `(rows, samples, classes)`."""
    return logits.log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])


def row_size(full: bool, classes: int, width: int) -> int:
    """How many numbers one row needs in computing its part of the curvature, or S."""
    return classes * classes * width if full else classes + width


def blocks(rows: int, each: int) -> Iterator[slice]:
    """Slices over the rows that bound the memory at `each` numbers per row."""
    size = max(1, _BLOCK // max(1, each))
    for start in range(0, rows, size):
        yield slice(start, start + size)


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a positive semi-definite matrix; rounding below zero is clipped."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0), vectors
