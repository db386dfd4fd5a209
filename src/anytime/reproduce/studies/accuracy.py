"""Figure 3, B.5 and B.11: the product keeps the accuracy of several networks, often improves it, and drops become rarer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anytime.calibrate.ensembles import fit_geometric
from anytime.combine import Rule
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, at_most, listed, means, signed
from anytime.reproduce.group import ACCURACY, ECE, FINAL_DROPS, HINDSIGHT, LABEL_DROPS, RULES, Group, backbones, published
from anytime.reproduce.needs import DVIT, L2W, MSDNET, ZTW, Need
from anytime.reproduce.runs import Run

_ENSEMBLE = "geometric ensemble"
KEPT, MINOR = 1.0, 3.0
"""Points of accuracy at the last exit: what we call kept, and what we call a minor cost."""


def accuracy(draft: Draft) -> Finding:
    """Accuracy of the three rules at each exit of MSDNet, and of IMTA if there is a run of it."""
    for group in backbones(draft.runs):
        ours, known = group.curves(ACCURACY), paper.known(paper.ACCURACY, group.runs[0])
        draft.plots.append(group.plot(group.title, ACCURACY, known=known))
        for rule, theirs in known.items():
            again = rule != "latest"  # at exit 1 all rules give the same answers
            allowed = paper.accuracy_tolerance(group.runs[0])
            what = f"{group.title}, {rule}"
            draft.compare_exits(what, ours[rule], theirs, tolerance=allowed, unit="%", from_second=again)
        last, mean = {rule: ours[rule][-1].mean for rule in ("product", "latest", "caching")}, group.all_over_exits(ACCURACY)
        draft.claim(
            f"{group.title}: the product is at least as accurate as the backbone at the last exit",
            last["product"] >= last["latest"],
            listed(last),
        )
        draft.claim(
            f"{group.title}: the product is more accurate than caching, on average over the exits",
            mean["product"] > mean["caching"],
            listed({rule: mean[rule] for rule in ("product", "caching", "latest")}),
        )
        draft.add(group, ACCURACY, name=f"{group.runs[0].network} {group.data}")
    others = _other_training(draft)
    missed = [row for row in draft.comparisons if row.within is False and row.what.startswith(paper.NETWORKS["msdnet"])]
    words = ", ".join(f"{row.what} ({signed(row.difference or 0.0, 1)} points)" for row in missed)
    found = draft.finding(
        note="The paper's numbers were read off its figure (±.2 points). At exit 1 all three rules give the same answers, so "
        "it is compared once. The table has the networks on fewer images, for the studies that need validation rows or many "
        "logits; they have another schedule too, so it does not tell which of both costs accuracy. The paper says that the "
        "product tends to be more accurate than caching, often slightly. "
        f"{f'Not explained: {words}; a batch of 64 at a rate of .1, as published, was not tried. ' if words else ''}ImageNet "
        "is not available here.",
        headings=("for other studies", "rule", "accuracy per exit, %"),
    )
    return replace(found, rows="; ".join((found.rows, *others)))


def _other_training(draft: Draft) -> list[str]:
    """Adds table rows of the networks that are not the reproduction; returns which test rows they belong to."""
    rows = []
    for runs in draft.runs.by_data(MSDNET, optional=True).values():
        if not any(run in draft.used for run in runs):
            group, name = Group.published(runs), runs[0].name.partition("-seed")[0]
            draft.table += [(name, rule, means(values)) for rule, values in group.curves(ACCURACY).items()]
            draft.used += runs
            draft.numbers[name] = group.numbers(ACCURACY)
            rows.append(f"the table: {group.rows}")
    return rows


def zero_time_waste(draft: Draft) -> Finding:
    """Accuracy, drops and hindsight improvability of the three rules on the cascading heads of Zero Time Waste."""
    runs = draft.runs.need(ZTW)
    group = Group.published(runs)
    ensemble = Group.measured(runs, *({**RULES, _ENSEMBLE: _geometric(run)} for run in runs))
    right, drops, hindsight = (group.curves(metric) for metric in (ACCURACY, LABEL_DROPS, HINDSIGHT))
    draft.used += group.runs
    draft.plots += [
        group.plot("Accuracy", ACCURACY),
        group.plot("Label drops", LABEL_DROPS),
        group.plot("Hindsight improvability", HINDSIGHT),
    ]
    draft.claim(
        "fewer drops of every size under the product",
        at_most(drops["product"], drops["latest"]),
        f"{listed(group.all_at(LABEL_DROPS, 0.1))} by .1",
    )
    pairs = list(zip(hindsight["product"], hindsight["latest"], strict=True))
    draft.claim(
        "less hindsight improvability at every exit after the first",
        all(mine.mean < base.mean for mine, base in pairs[1:]),
        f"{listed({rule: values[-1].mean for rule, values in hindsight.items()}, digits=1)} at the last exit",
    )
    mean = group.all_over_exits(ACCURACY)
    draft.claim(
        f"at a minor cost in accuracy (at most {MINOR:g} points at the last exit)",
        right["product"][-1].mean >= right["latest"][-1].mean - MINOR,
        "; ".join(f"{rule}: mean over exits {mean[rule]:.1f}, last {values[-1].mean:.1f} %" for rule, values in right.items()),
    )
    both = ensemble.curves(LABEL_DROPS)
    draft.claim(
        "fewer drops of every size under the product than under ZTW's geometric ensemble",
        at_most(both["product"], both[_ENSEMBLE]),
        f"{listed(ensemble.all_at(LABEL_DROPS, 0.1))} by .1, on the rows below",
    )
    for rule in ensemble.metrics:
        accuracy, error = (ensemble.over_exits(rule, metric).mean for metric in (ACCURACY, ECE))
        worst = ensemble.curve(rule, HINDSIGHT)[-1].mean
        by = ", ".join(f"{ensemble.at(rule, LABEL_DROPS, limit).mean:.1f}" for limit in (0.1, 0.5))
        last = ensemble.curve(rule, ACCURACY)[-1].mean
        draft.table.append((rule, f"{accuracy:.1f}, {last:.1f} %", f"{by} %", f"{worst:.1f} %", f"{error:.3f}"))
    draft.numbers = group.numbers(ACCURACY, LABEL_DROPS, HINDSIGHT)
    draft.numbers["kept rows"] = ensemble.numbers(ACCURACY, LABEL_DROPS, HINDSIGHT, ECE)
    return draft.finding(
        rows=f"{group.rows}; the table: {ensemble.rows}",
        note=f"{len(right['latest'])} exits, one after every block of a ResNet. The backbone is the cascade of heads; the "
        "table adds ZTW's geometric ensemble of the heads. Its weights are fitted on the "
        f"{runs[0].logits('val')[0].shape[1]:,} validation rows whose logits were kept, without the biases of classes, for "
        "which these are too few; its authors fit both on all training rows. The paper's figure was not read off; its claims "
        "are checked.",
        headings=("rule", "accuracy, mean over exits and last", "label drops ≥ .1, ≥ .5", "hindsight, last exit", "mean ECE"),
    )


def _geometric(run: Run) -> Rule[Any]:
    return fit_geometric(*run.logits("val"), biases=False)


def dvit(draft: Draft) -> Finding:
    """The product on the dynamic vision transformer, whose exits are transformers with more and more tokens."""
    return _accuracy_and_drops(
        draft,
        DVIT,
        "The paper shows networks that others trained on ImageNet, which is not available here. Ours is the same cascade of "
        "three transformers at the size of CIFAR, trained from scratch: 4², 6² and 8² tokens for images of 32², half the width "
        "and half the depth. Mixed images and smoothed labels, which belong to the published training, make softmaxes unsure. "
        "Three exits leave fewer chances to drop than seven.",
    )


def l2w(draft: Draft) -> Finding:
    """The product on L2W, an MSDNet whose training samples were weighted by a second network."""
    return _accuracy_and_drops(
        draft,
        L2W,
        "The network has five exits and linear growth, as L2W was published for CIFAR. To fit the available GPU time the run "
        "has 105 epochs instead of 300, and its weight network is updated on every fourth batch.",
    )


def _accuracy_and_drops(draft: Draft, need: Need, note: str) -> Finding:
    """Accuracy and label drops under the three rules, for each data set with a run."""
    for group in published(draft.runs, need):
        title, right, drops = group.title, group.curves(ACCURACY), group.curves(LABEL_DROPS)
        draft.plots += [group.plot(f"{title}: accuracy", ACCURACY), group.plot(f"{title}: label drops", LABEL_DROPS)]
        draft.claim(
            f"{title}: the product keeps the accuracy (at most {KEPT:g} point lower at the last exit)",
            right["product"][-1].mean >= right["latest"][-1].mean - KEPT,
            "; ".join(f"{rule} {means(values)} %" for rule, values in right.items()),
        )
        draft.claim(
            f"{title}: fewer drops of every size under the product than under the backbone",
            at_most(drops["product"], drops["latest"]),
            f"{listed(group.all_at(LABEL_DROPS, 0.1))} by .1",
        )
        final = group.curves(FINAL_DROPS)
        draft.claim(
            f"{title}: the final answer's probability drops less often under the product than under the backbone or caching",
            at_most(final["product"], final["latest"]) and at_most(final["product"], final["caching"]),
            f"{listed(group.all_at(FINAL_DROPS, 0.01))} by .01",
        )
        draft.add(group, ACCURACY, LABEL_DROPS, FINAL_DROPS, ECE)
    return draft.finding(note=f"{note} The paper's curves were not read off; its claims about them are checked.")
