"""The runs that a study needs, and how to train them if they are missing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from anytime.errors import MissingRunError

_CIFAR = ("cifar10", "cifar100")


@dataclass(frozen=True)
class Need:
    """Runs of one network.

    Attributes:
        network: As `anytime.reproduce.runs.network_of` names it.
        data: Data sets; one is enough, all that are available are used.
        seeds: Smallest number of runs in all.
        recipe: The recipe of `anytime train` for such a run, or None if there is none.
        first: A network whose runs are used instead, on the data sets that have some.
    """

    network: str
    data: tuple[str, ...] = _CIFAR
    seeds: int = 1
    recipe: str | None = None
    first: str | None = None

    def __str__(self) -> str:
        return f"{self.network} on {' or '.join(self.data)}" + (f" (≥ {self.seeds} seeds)" if self.seeds > 1 else "")

    def missing(self, where: str, found: int) -> MissingRunError:
        """The error for missing runs."""
        few = f"{found} of {self.seeds} runs" if found else "no run"
        train = (
            f"anytime train {self.recipe} --root DATA --out RUN" if self.recipe else "train it with --config (it has no recipe)"
        )
        return MissingRunError(
            f"{where} has {few} of {self.network} on {' or '.join(self.data)}",
            expected=f"{self.seeds} or more, each a folder with config.json, metrics and logits",
            fix=f"{train}, then python results/publish.py RUN FOLDER/NAME",
            path=where,
        )


MSDNET = Need("msdnet", recipe="cifar100-msdnet")
MSDNET_100 = Need("msdnet", ("cifar100",), recipe="cifar100-msdnet")
# The reproduction: trained by the published schedule on almost all images, so that few rows are left to fit anything on.
REPRODUCED = replace(MSDNET, first="msdnet-published")
REPRODUCED_100 = replace(MSDNET_100, first="msdnet-published")
SEEDS_100 = Need("msdnet", ("cifar100",), seeds=2, recipe="cifar100-msdnet")
TINY = Need("msdnet", ("tiny-imagenet",), recipe="tiny-imagenet-msdnet-4")
IMTA = Need("imta", recipe="cifar100-imta-2")
ZTW = Need("ztw", ("cifar100",), recipe="cifar100-ztw")
FINETUNED = Need("msdnet-finetuned", recipe="cifar100-msdnet-finetuned")
L2W = Need("l2w", recipe="cifar100-l2w")
DVIT = Need("dvit", recipe="cifar100-dvit")
_TEXTS = ("imdb", "sst2", "agnews", "trec", "banking77", "clinc150")
TEXT = Need("minilm", _TEXTS, recipe="trec-minilm")
SINGLE_HEAD = Need("minilm-single", _TEXTS)
_SOME = {"clinc150": (2, 3, 5, 10, 20, 50, 100), "banking77": (3, 5, 10)}
SOME_CLASSES = Need("minilm", tuple(f"{data}-{classes}" for data, counts in _SOME.items() for classes in counts))
OUT_OF_SCOPE = Need("minilm", ("clinc150",), recipe="clinc150-minilm")
