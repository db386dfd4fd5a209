"""B.2 and B.8: what each part of the product contributes: the activation, and multiplying rather than averaging."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from anytime.combine import Activation, ClippedReLU, Exponential, Heaviside, Latest, Mixture, Product, ReLU, Rule, Sigmoid
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, listed, means
from anytime.reproduce.group import ACCURACY, CONFIDENCE, ECE, ENTROPY, FINAL_DROPS, LABEL_DROPS, Group, title_of
from anytime.reproduce.needs import MSDNET, MSDNET_100

_ACTIVATIONS: dict[str, Activation] = {"ReLU": ReLU(), "Heaviside": Heaviside(), "exponential": Exponential()}
GOOD_ACCURACY, GOOD_DROPS = 1.0, 5.0
"""A good combination: points below the best accuracy at the last exit, and percent of inputs that drop by .1, at most."""
_CONFIDENT = 2.0
"""How many times the confidence of the first exit."""
_MOST = 3.0
"""Points of accuracy: far more than the sigmoid costs, far less than rounding its evidence to ties would cost."""
LIMITS = (0.5, 2.0, 5.0, 10.0)


def ablation(draft: Draft) -> Finding:
    """Accuracy, drops, calibration error and confidence of six combinations."""
    rules: dict[str, Rule[Any]] = {f"product, {name}": Product(kind) for name, kind in _ACTIVATIONS.items()}
    rules |= {f"mixture, {name}": Mixture(kind) for name, kind in _ACTIVATIONS.items()}
    group = Group.measured(draft.runs.need(MSDNET_100), rules)
    right, confidence, ece = (group.curves(metric) for metric in (ACCURACY, CONFIDENCE, ECE))
    last, mean = {name: values[-1].mean for name, values in right.items()}, group.all_over_exits(ACCURACY)
    drops, final = group.all_at(LABEL_DROPS, 0.1), group.all_at(FINAL_DROPS, 0.01)
    good = [name for name in rules if last[name] >= max(last.values()) - GOOD_ACCURACY and drops[name] <= GOOD_DROPS]
    grows = [name for name, values in confidence.items() if values[-1].mean > _CONFIDENT * values[0].mean]
    relu, heaviside = "product, ReLU", "product, Heaviside"
    draft.used += group.runs
    draft.plots += [
        group.plot("Accuracy", ACCURACY),
        group.plot("Final answer drops", FINAL_DROPS),
        group.plot("Label drops", LABEL_DROPS),
        group.plot("Calibration error", ECE),
        group.plot("Confidence", CONFIDENCE),
    ]
    draft.claim(
        "the ReLU product is the only one good in both accuracy and drops (the figure's caption)",
        good == [relu],
        f"good are {', '.join(good) or 'none'}: within {GOOD_ACCURACY:g} point of the best last exit, and at most "
        f"{GOOD_DROPS:g} % dropping by .1",
    )
    draft.claim(
        "only ReLU, multiplied or averaged, is good in both (the text)",
        set(good) == {relu, "mixture, ReLU"},
        f"label drops by .1: product {drops[relu]:.2f} %, mixture {drops['mixture, ReLU']:.2f} %",
    )
    ends = {name: f"{values[0].mean:.1f} → {values[-1].mean:.1f} %" for name, values in confidence.items()}
    draft.claim(
        f"of these, only the product becomes confident (more than {_CONFIDENT:g} times as much at the last exit as at the "
        "first)",
        relu in grows and "mixture, ReLU" not in grows,
        f"product {ends[relu]}, mixture {ends['mixture, ReLU']}",
    )
    draft.claim(
        "of the products, the one with the Heaviside is the least accurate",
        mean[heaviside] == min(value for name, value in mean.items() if name.startswith("product")),
        f"mean accuracy {mean[heaviside]:.1f} % against {mean[relu]:.1f} %",
    )
    product, mixture = drops["product, exponential"], drops["mixture, exponential"]
    draft.claim(
        f"averaging or multiplying softmaxes is not enough (more than {GOOD_DROPS:g} % drop by .1)",
        min(product, mixture) > GOOD_DROPS,
        f"drops by .1: product {product:.1f} %, mixture {mixture:.1f} %, ReLU product {drops[relu]:.2f} %",
    )
    draft.table += [
        (
            name,
            f"{right[name][0].mean:.1f}, {last[name]:.1f} %",
            f"{drops[name]:.2f} %",
            f"{ece[name][0].mean:.3f}, {ece[name][-1].mean:.3f}",
            f"{confidence[name][0].mean:.1f}, {confidence[name][-1].mean:.1f} %",
        )
        for name in rules
    ]
    draft.numbers = group.numbers(ACCURACY, LABEL_DROPS, FINAL_DROPS, ECE, CONFIDENCE)
    return draft.finding(
        rows=group.rows,
        note="The paper's figures were not read off; the order they show is checked. Its caption and its text differ: the text "
        "finds the ReLU mixture comparable to the product in accuracy and drops, and rejects it because it never becomes "
        "confident; confidence separates the two here as well. That the Heaviside product never lowers the final "
        f"answer's probability is a theorem ({final[heaviside]:.2f} % of the inputs drop by .01, those that collapsed). All "
        "classes that it leaves are equal: ours "
        "answers the first of them, the paper's one at random, which is correct about as often as the mean confidence.",
        headings=(
            "rule",
            "accuracy, first and last exit",
            "label drops ≥ .1",
            "ECE, first and last",
            "confidence, first and last",
        ),
    )


def sigmoid(draft: Draft) -> Finding:
    """Accuracy, drops and calibration error of the backbone and of the product with either activation."""
    rules = {"latest": Latest(), "sigmoid product": Product(Sigmoid()), "product": Product()}
    group = Group.measured(draft.runs.need(MSDNET_100), rules)
    right, ece, mean = group.curves(ACCURACY), group.curves(ECE), group.all_over_exits(ECE)
    pairs = list(zip(ece["sigmoid product"], ece["product"], strict=True))
    better = [str(exit) for exit, (ours, relu) in enumerate(pairs, 1) if ours.mean < relu.mean]
    costs = [relu.mean - ours.mean for ours, relu in zip(right["sigmoid product"], right["product"], strict=True)]
    draft.used += group.runs
    draft.plots += [
        group.plot("Accuracy", ACCURACY),
        group.plot("Label drops", LABEL_DROPS),
        group.plot("Calibration error", ECE),
    ]
    draft.claim(
        f"the sigmoid costs accuracy on average over the exits, and at no exit {_MOST:g} points or more",
        sum(costs) / len(costs) > 0 and max(costs) < _MOST,
        f"{sum(costs) / len(costs):.1f} points on average, {min(costs):.1f} to {max(costs):.1f}; sigmoid "
        f"{means(right['sigmoid product'])} %; ReLU {means(right['product'])} %",
    )
    draft.claim(
        "the sigmoid worsens calibration, on average over the exits",
        mean["sigmoid product"] > mean["product"],
        f"mean ECE {mean['sigmoid product']:.3f} and {mean['product']:.3f}; sigmoid {means(ece['sigmoid product'], 3)}; ReLU "
        f"{means(ece['product'], 3)}",
    )
    draft.numbers = group.numbers(ACCURACY, LABEL_DROPS, ECE, ENTROPY)
    draft.numbers["drops_by_at_least_0.1"] = group.all_at(LABEL_DROPS, 0.1)
    return draft.finding(
        rows=group.rows,
        note="The paper's figure was not read off; its claims about it are checked. The paper explains the loss by large "
        "logits that all map to 1, which does not preserve their ranking. That is rounding: here labels are taken before it, "
        "and what is left is the cost of the sigmoid itself."
        + (f" The sigmoid has the lower calibration error at exits {', '.join(better)}." if better else ""),
    )


def clip(draft: Draft) -> Finding:
    """Accuracy and drops for limits from the Heaviside (monotone, inaccurate) to the ReLU (accurate, nearly monotone)."""
    rules: dict[str, Rule[Any]] = {"Heaviside": Product(Heaviside())}
    rules |= {f"clipped at {limit:g}": Product(ClippedReLU(limit)) for limit in LIMITS} | {"ReLU": Product()}
    for data, runs in draft.runs.by_data(MSDNET).items():
        group, title = Group.measured(runs, rules), title_of(data)
        draft.plots += [
            group.plot(f"{title}: accuracy", ACCURACY),
            group.plot(f"{title}: label drops", LABEL_DROPS),
            group.plot(f"{title}: final answer drops", FINAL_DROPS),
        ]
        last = {name: values[-1].mean for name, values in group.curves(ACCURACY).items()}
        drops = group.all_at(FINAL_DROPS, 0.01)
        draft.claim(f"{title}: the higher the limit, the better the last exit", _rises(last), listed(last, digits=1))
        draft.claim(f"{title}: the higher the limit, the more final answers drop", _rises(drops), f"{listed(drops)} by ≥ .01")
        draft.add(group, ACCURACY, LABEL_DROPS, FINAL_DROPS)
    return draft.finding(
        note="The paper shows CIFAR-10, with limits that it does not name; a data set without a run here is left out."
    )


def _rises(values: dict[str, float]) -> bool:
    return all(after >= before for before, after in pairwise(values.values()))
