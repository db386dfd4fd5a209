"""B.3.2: finetuning with the product as the likelihood calibrates it, at a small cost in accuracy.

All metrics are of the test rows whose logits were kept for both the backbone and the finetuned network, so that both are
measured on the same inputs.
"""

from __future__ import annotations

from typing import Any

from anytime.combine import Latest, Product, Rule, Softplus
from anytime.metrics import follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, at_most, means
from anytime.reproduce.group import ACCURACY, ECE, LABEL_DROPS, NLL, TEN_AGAIN, Group, ten_rows, title_of
from anytime.reproduce.needs import FINETUNED, Need
from anytime.reproduce.plots import Plot, inputs_plot, line, over_exits
from anytime.reproduce.runs import Run, on_shared_rows

SOFTPLUS: Rule[Any] = Product(Softplus(), weights="ones")
"""The product of the finetuned networks."""
_BASE: dict[str, Rule[Any]] = {"latest": Latest(), "product": Product(), "softplus product": SOFTPLUS}
_TUNED: dict[str, Rule[Any]] = {"finetuned": SOFTPLUS, "finetuned, ReLU": Product(weights="ones")}
_OTHERS: dict[str, dict[str, Rule[Any]]] = {
    "msdnet-heads": {"heads alone finetuned": SOFTPLUS},
    "msdnet-product": {"trained with the product alone": SOFTPLUS},
}
_IN_EPOCHS = "product, softplus, ones"
_DRAWN = {"latest": 0, "product": 2, "finetuned": 3}
_MINOR = 3.0
"""Points of accuracy that we call a minor cost."""


def finetune(draft: Draft) -> Finding:
    """Calibration error, drops and accuracy beside the backbone's, for each data set with a finetuned network."""
    rows = []
    for data, tuned in draft.runs.by_data(FINETUNED).items():
        others = [draft.runs.find(network, data) for network in _OTHERS]
        kinds = draft.runs.need(Need("msdnet", (data,), recipe=f"{data}-msdnet")), tuned, *others
        shared, early = iter(on_shared_rows(tuple(run for kind in kinds for run in kind))), _earlier(tuned)
        base, tuned, *others = (tuple(next(shared) for _ in kind) for kind in kinds)
        measured = zip((base, tuned, *others), (_BASE, _TUNED, *_OTHERS.values()), strict=True)
        parts = [Group.measured(runs, rules) for runs, rules in measured if runs]
        group, title = parts[0], title_of(data)
        for part in parts[1:]:
            group = group.merge(part)
        known = paper.ECE["finetuned"] if data == "cifar100" else ()
        _draw(draft, title, group, known, base[0], tuned[0])
        names = [f"{title}, ECE, finetuned, exit {exit}" for exit in range(1, len(known) + 1)]
        draft.compare(names, group.curve("finetuned", ECE)[: len(known)], known, tolerance=paper.ECE_TOLERANCE)
        _claims(draft, title, data, group)
        for rule in group.metrics:
            accuracy, error = group.curve(rule, ACCURACY), group.curve(rule, ECE)
            draft.table.append(
                (title, rule, means(accuracy), means(error, 3), f"{group.at(rule, LABEL_DROPS, 0.1).mean:.2f} %")
            )
        draft.table += [(title, *cells) for cells in early]
        draft.add(group, ACCURACY, ECE, NLL, LABEL_DROPS)
        rows += [f"{part.runs[0].name.partition('-seed')[0]}: {part.rows}" for part in parts]
    return draft.finding(
        rows="; ".join(rows),
        note="Finetuned: the whole network, trained with the sum of the cross-entropies for two thirds of the epochs, then "
        "with the product's likelihood, with softplus and weights of one; measured under that product at its end (the recipes "
        "`cifar10-msdnet-finetuned` and `cifar100-msdnet-finetuned` list what differs: 120 and 200 epochs instead of 300, "
        "batch, warm-up). Beside it are the backbone, its product as in the other studies (ReLU, weights i/M), and in the "
        "table its product with softplus and weights of one, which needs no training; and the finetuned network under a ReLU "
        "with weights of one, as the released notebook runs it. An earlier epoch is the one with the lowest mean ECE on "
        "validation rows of those measured since the product's likelihood began, on all test rows. Heads alone: one epoch on "
        "a frozen network (`cifar100-msdnet-heads`), which is not the paper's method and was chosen on test rows. With the "
        "product alone: the same likelihood from the first epoch on, which the paper avoids as hard to train; each exit then "
        "only corrects the product before it. No claim uses these two. "
        f"Crosses are the ends of the paper's curve. {TEN_AGAIN}",
        headings=("data", "network and rule", "accuracy, %", "ECE", "drops by ≥ .1"),
    )


def _earlier(tuned: tuple[Run, ...]) -> list[tuple[str, ...]]:
    """Table cells of each run after the epoch with the lowest mean ECE on validation rows, unless that is the last one."""
    rows: list[tuple[str, ...]] = []
    for run in tuned:
        val, test = run.epochs("val"), run.epochs()
        best = min(val, key=lambda epoch: sum(val[epoch][_IN_EPOCHS]["ece"]), default=0)
        if val and best != max(val):
            found = test[best][_IN_EPOCHS]
            accuracy = ", ".join(f"{100 * value:.1f}" for value in found["accuracy"])
            error, drops = ", ".join(f"{value:.3f}" for value in found["ece"]), found["label_drop_percent_0.1"]
            rows.append((f"finetuned, epoch {best} of {max(val)}", accuracy, error, f"{drops:.2f} %"))
    return rows


def _draw(draft: Draft, title: str, group: Group, known: tuple[float | None, ...], base: Run, tuned: Run) -> None:
    """The paper's three plots, and the same ten inputs under the backbone, faint, and after finetuning."""
    crosses = {"finetuned": known}
    error = [line(rule, group.curve(rule, ECE), look, paper=crosses.get(rule, ())) for rule, look in _DRAWN.items()]
    limits = group.limits(LABEL_DROPS)
    drops = tuple(line(rule, group.curve(rule, LABEL_DROPS), look, x=limits) for rule, look in _DRAWN.items())
    right = [line(rule, group.curve(rule, ACCURACY), look) for rule, look in _DRAWN.items()]
    (before, labels), (after, _) = base.logits(), tuned.logits()
    probability = follow(Latest()(before), labels).label_probability
    chosen = ten_rows(probability)
    after_tuning = follow(SOFTPLUS(after[:, chosen]), labels[chosen]).label_probability
    draft.plots += [
        over_exits(f"{title}: calibration error", ECE.axis, error, zero=True),
        Plot(f"{title}: label drops", LABEL_DROPS.x_title, LABEL_DROPS.axis, drops, kind="symlog"),
        over_exits(f"{title}: accuracy", ACCURACY.axis, right),
        inputs_plot(f"{title}: ten inputs, finetuned", after_tuning, behind=probability[:, chosen]),
    ]


def _claims(draft: Draft, title: str, data: str, group: Group) -> None:
    error, drops, right = ({rule: group.curve(rule, metric) for rule in _DRAWN} for metric in (ECE, LABEL_DROPS, ACCURACY))
    if data != "cifar10":  # the paper claims this for CIFAR-100 only
        draft.claim(
            f"{title}: finetuned, the calibration error is at or below the backbone's at every exit",
            at_most(error["finetuned"], error["latest"]),
            "; ".join(f"{rule} {means(error[rule], 3)}" for rule in ("finetuned", "latest")),
        )
    mean = group.all_over_exits(ECE)
    draft.claim(
        f"{title}: finetuning lowers the product's mean calibration error",
        mean["finetuned"] < mean["product"],
        f"over all exits {mean['finetuned']:.3f}, before {mean['product']:.3f}",
    )
    draft.claim(
        f"{title}: finetuned, fewer drops of every size than under the backbone",
        at_most(drops["finetuned"], drops["latest"]),
        ", ".join(f"{rule} {group.at(rule, LABEL_DROPS, 0.1).mean:.2f} %" for rule in _DRAWN) + " by .1",
    )
    draft.claim(
        f"{title}: at a minor cost in accuracy (at most {_MINOR:g} points to the product before, at the last exit)",
        right["finetuned"][-1].mean >= right["product"][-1].mean - _MINOR,
        "; ".join(f"{rule} {means(values)} %" for rule, values in right.items()),
    )
