"""Figure 6: the product is badly calibrated at its first exits, and finetuning with it closes the gap."""

from __future__ import annotations

from anytime.combine import Latest, Product, Softplus
from anytime.metrics import follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Comparison, Finding, Panel
from anytime.reproduce.measure import (
    PLAIN,
    against_paper,
    by_exit,
    curve,
    line,
    measured,
    names_of,
    plain_numbers,
    rows_in_words,
    stored,
    ten_rows,
    text_of,
)
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.runs import on_shared_rows
from anytime.reproduce.studies.marginal import TEN, single_lines


def study(context: Context) -> Finding:
    """Calibration error of the three rules, and of a finetuned network where there is a run of one."""
    runs = context.runs.need(MSDNET_100)
    figures = stored(runs)
    real = runs[0].data == "cifar100"
    known = {rule: paper.ECE[rule] for rule in PLAIN} if real else {}
    error = by_exit("Calibration error", "ECE", figures, "ece", zero=True, paper_values=known)
    comparisons: list[Comparison] = []
    for rule, theirs in known.items():
        comparisons += against_paper(
            lambda exit, rule=rule: f"ECE, {rule}, exit {exit + 1}",  # type: ignore[misc]
            curve(figures, rule, "ece"),
            theirs,
            tolerance=paper.ECE_TOLERANCE,
        )
    base, product = curve(figures, "latest", "ece"), curve(figures, "product", "ece")
    claims = [
        Claim(
            "the product's error at the first exit is far above the backbone's",
            product[0].mean > 2 * base[0].mean,
            f"product {text_of(product, digits=3)}; latest {text_of(base, digits=3)}",
        )
    ]
    panels = [error]
    tuned = context.runs.find("msdnet-finetuned", runs[0].data)
    note = (
        "No finetuned network is at hand, so the paper's fourth line and its right panel are missing: `anytime train "
        "cifar100-msdnet-finetuned` makes one."
    )
    if tuned:
        before, tuned_first = on_shared_rows((runs[0], tuned[0]))
        found = measured(tuned, {"finetuned": Product(Softplus(), weights="ones")})
        ours = curve(found, "finetuned", "ece")
        comparisons += against_paper(
            lambda exit: f"ECE, finetuned, exit {exit + 1}", ours, paper.ECE["finetuned"], tolerance=paper.ECE_TOLERANCE
        )
        claims.append(
            Claim(
                "finetuned, the error is at or under the backbone's at every exit",
                all(mine.mean <= theirs.mean for mine, theirs in zip(ours, base, strict=True)),
                f"finetuned {text_of(ours, digits=3)}",
            )
        )
        drawn = line("finetuned, softplus product", ours, 3, paper_values=paper.ECE["finetuned"])
        panels = [Panel(error.title, "exit", "ECE", (*error.lines, drawn), exits=error.exits, zero=True)]
        (logits, labels), (others, _) = before.logits(), tuned_first.logits()
        every = follow(Latest()(logits), labels).label_probability
        chosen = ten_rows(every)
        after = follow(Product(Softplus(), weights="ones")(others[:, chosen]), labels[chosen]).label_probability
        lines = (*single_lines(every[:, chosen], faint=True), *single_lines(after))
        panels.append(
            Panel("Ten inputs, finetuned", "exit", "label's probability", lines, exits=error.exits, y_range=(0.0, 1.0))
        )
        note = f"Finetuned figures are of the rows whose logits were kept. {TEN}"
    return context.finding(
        runs=names_of(runs, tuned),
        rows=rows_in_words(runs),
        note="ECE with 15 equal bins, as in the paper. Of the backbone's and caching's curves only the ends were read off. "
        f"{note}",
        panels=tuple(panels),
        comparisons=tuple(comparisons),
        claims=tuple(claims),
        numbers=plain_numbers(figures, ("ece", "nll", "brier")),
    )
