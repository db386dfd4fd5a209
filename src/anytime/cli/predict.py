"""`anytime predict MODEL INPUT --deadline 5ms`: how the answer grows exit by exit, and the one there is in time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anytime.errors import DeadlineTooShort, OptionError
from anytime.safe_text import print_safely as print
from anytime.safe_text import printable

if TYPE_CHECKING:
    from torch import Tensor

    from anytime.conformal import ConformalSets
    from anytime.run import Answer, Budget
    from anytime.run.engines import Engine

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]

STOPPED = {
    "finished": "all exits are done",
    "deadline": "time was up",
    "forecast": "the next exit was not expected in time",
    "exits": "no more exits were asked for",
    "macs": "the next exit costs more MACs than were allowed",
}
_RUNS = 10  # to learn how long the stages take, before the one that counts
_ROWS = 20
_WIDTH = 24
_PARTS = " ▏▎▍▌▋▊▉"


def predict(
    model: Path,
    input: str,
    /,
    *,
    deadline: str | None = None,
    exits: int | None = None,
    macs: float | None = None,
    rule: str | None = None,
    engine: str = "auto",
    calibration: Annotated[list[Path] | None, Parameter(negative=())] = None,
    data: str | None = None,
    threads: int = 1,
    top: int = 5,
    trust: Flag = False,
    json: Flag = False,
) -> int:
    """Show a model an input: how the answer grows exit by exit, and the best one within a budget.

    Args:
        model: The folder of a training run, one that `anytime.models.save` made, or one that `anytime export` wrote.
        input: A picture, or `.npy` or `.npz` with one input or a batch; for texts, a text or a `.txt` with one a line.
        deadline: How long it may take, such as 5ms; no limit by default.
        exits: How many exits at most.
        macs: How many MACs (multiply-accumulates) per input at most, such as 60e6.
        rule: How the exits' answers are combined, such as latest or product; by default what the calibration was fitted for,
            or the product, with fewer than five classes caching.
        engine: What runs the stages: eager, folded, onnxruntime, cuda-graphs, or auto for the quickest here.
        calibration: A file that fitting saved: temperatures, a fitted product, a tuned rule, prediction sets; once for each.
        data: What the model learnt from, if its folder does not say: cifar10, cifar100, imagenet or a run's data.json.
        threads: For each stage.
        top: How many classes to show of the final answer.
        trust: Load exported stages in the format torch-export too. Such files can run any code; ONNX stages need no trust.
        json: Print one JSON document instead of words.
    """
    import warnings

    import anytime
    from anytime.cli.inputs import Description, open_any, read_input, shown
    from anytime.cli.stages import make_engine
    from anytime.combine import rule as read_rule
    from anytime.combine.advice import advise, default_rule
    from anytime.conformal import ConformalSets
    from anytime.errors import FewClassesWarning
    from anytime.models import measure_cost
    from anytime.run import Budget
    from anytime.run.export import ExportedModel

    budget, named = Budget(time=deadline, macs=macs, exits=exits), None if rule is None else read_rule(rule)
    if top < 1:
        raise OptionError(f"--top is {top}", expected="at least 1", fix="leave it out")
    opened = open_any(model, data, threads=threads, trust=trust)
    x, note = read_input(input, opened)
    fitted = [anytime.load(path) for path in calibration or ()]
    for each in fitted:
        each.check_fits(opened.model.num_exits, opened.classes)
    exported = isinstance(opened.model, ExportedModel)
    chosen = default_rule(opened.classes) if named is None and not fitted and not exported else named
    if note is not None:
        print(note, file=sys.stderr)
    made = make_engine(opened.model, engine, example=x, threads=threads)
    costs = None if macs is None or exported else measure_cost(opened.network, x[:1]).macs
    print(f"engine: {made.name} ({getattr(made, 'why', 'asked for')})", file=sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewClassesWarning)  # it is said in this command's own way
            answers, used = grow(made, x, budget, rule=chosen, calibration=fitted, costs=costs)
    except DeadlineTooShort as error:
        error.fix = "allow more time with --deadline, or use a smaller network"
        print(f"anytime: {error}", file=sys.stderr)
        return 1
    if not fitted and (said := advise(used, opened.classes)) is not None:
        print(f"anytime: {said}", file=sys.stderr)
    words = (opened.data or Description(opened.name, (), ())).word
    told = {"model": opened.name, "input": shown(input, opened), "engine": made.name, "rule": repr(used)}
    sets = next((each for each in fitted if isinstance(each, ConformalSets)), None)
    if json:
        import json as writer

        print(writer.dumps({**told, **document(answers, budget, words, top=top)}, allow_nan=False))
    else:
        print(" · ".join(map(printable, told.values())) + "\n")
        print(growth(answers, words))
        print(outcome(answers, budget, words, top=top, sets=sets))
    return 0


def grow(
    engine: Engine, x: Tensor, budget: Budget, *, rule: Any, calibration: Sequence[Any], costs: Sequence[float] | None = None
) -> tuple[list[Answer], Any]:
    """One answer after each exit within a budget, and the rule they are by; the stages have run before, as in a long life.

    Args:
        engine: What runs the stages.
        x: Inputs with the batch first.
        budget: The limits.
        rule: A rule, or None for what the calibration was fitted for.
        calibration: Fitted objects.
        costs: MACs up to each exit, for a budget that names MACs.
    """
    from anytime.run import Runner, profile_model

    profile = None if budget.time is None else profile_model(engine, x, batch_sizes=(len(x),), repeats=_RUNS)
    with Runner(engine, rule, engine, calibration=tuple(calibration), profile=profile, costs=costs, threads=None) as runner:
        for _ in runner.stream(x):  # a rule, too, is slow the first time
            pass
        return list(runner.stream(x, budget=budget)), runner.rule


def reason(last: Answer) -> str:
    """Why the stages ended where they did. A stream that stops for its deadline has told its last answer before it knew."""
    return last.reason or ("forecast" if last.deadline_met else "deadline")


def growth(answers: Sequence[Answer], words: Callable[[int], str]) -> str:
    """A line an exit: when its answer was there, what it was and how sure, for one input; for a batch, how many changed."""
    single = len(answers[0].labels) == 1
    lines, before = [], None
    width = max(len(words(int(label))) for answer in answers for label in answer.labels) if single else 0
    for answer in answers:
        when = f"exit {answer.exit:>2}  {_time(answer.elapsed):>9}"
        sure = float(answer.confidence.mean())
        if single:
            back = "  fell back" if bool(answer.fell_back) else ""
            lines.append(f"{when}  {words(answer.label):{width}}  {sure:.3f} {bar(sure)}{back}".rstrip())
        else:
            changed = "" if before is None else f", {int((answer.labels != before).sum())} answers changed"
            back = f", {fell} fell back" if (fell := int(answer.fell_back.sum())) else ""
            lines.append(f"{when}  mean probability {sure:.3f} {bar(sure)}{changed}{back}")
        before = answer.labels
    return "\n".join([*lines, f"stopped: {STOPPED[reason(answers[-1])]}", ""])


def outcome(
    answers: Sequence[Answer], budget: Budget, words: Callable[[int], str], *, top: int, sets: ConformalSets | None = None
) -> str:
    """The final answer in words, with its prediction set, and whether it was in time."""
    last = answers[-1]
    lines = []
    for row in range(min(len(last.labels), _ROWS)):
        fell = ", fell back" if bool(last.fell_back[row]) else ""
        number = f"input {row + 1}: " if len(last.labels) > 1 else ""
        place = f"exit {last.exit} of {last.exits}"
        lines.append(f"{number}{words(int(last.labels[row]))}, {float(last.confidence[row]):.3f}, from {place}{fell}")
        best = _best(last, row, top) if len(last.labels) == 1 else []
        width = max((len(words(label)) for label, _ in best), default=0)
        lines += [f"  {words(label):{width}}  {share:.3f} {bar(share)}".rstrip() for label, share in best]
        if last.prediction_set is not None:
            lines.append(f"  {_set(last.prediction_set[row], words, sets)}")
    if len(last.labels) > _ROWS:
        lines.append(f"and {len(last.labels) - _ROWS} more: --json has them all")
    if budget.time is not None:
        met = "deadline met" if last.deadline_met else "deadline not met"
        lines.append(f"{met}: {_time(last.elapsed)} of {_time(budget.time)}")
    return "\n".join(lines)


def document(answers: Sequence[Answer], budget: Budget, words: Callable[[int], str], *, top: int) -> dict[str, Any]:
    """The same for machines; times are in seconds."""
    last = answers[-1]
    return {
        "inputs": len(last.labels),
        "exits": last.exits,
        "growth": [
            {"exit": answer.exit, "elapsed": answer.elapsed, "answers": [_row(answer, row, words) for row in _rows(answer)]}
            for answer in answers
        ],
        "stopped": reason(last),
        "exit": last.exit,
        "elapsed": last.elapsed,
        "deadline": budget.time,
        "deadline_met": last.deadline_met,
        "answers": [
            {
                **_row(last, row, words),
                "top": [{"label": label, "name": words(label), "probability": share} for label, share in _best(last, row, top)],
                "set": None if last.prediction_set is None else last.prediction_set[row].nonzero()[:, 0].tolist(),
            }
            for row in _rows(last)
        ],
    }


def bar(share: float) -> str:
    """A share between 0 and 1 as a bar of blocks.

    >>> bar(0.5), bar(0.01), bar(0)
    ('████████████', '▎', '')
    """
    full, part = divmod(round(8 * _WIDTH * share), 8)
    return ("█" * full + _PARTS[part]).rstrip()


def _row(answer: Answer, row: int, words: Callable[[int], str]) -> dict[str, Any]:
    label = int(answer.labels[row])
    return {
        "label": label,
        "name": words(label),
        "probability": float(answer.confidence[row]),
        "fell_back": bool(answer.fell_back[row]),
    }


def _rows(answer: Answer) -> range:
    return range(len(answer.labels))


def _best(answer: Answer, row: int, top: int) -> list[tuple[int, float]]:
    """The most probable classes; those that the rule has ruled out are not among them."""
    values, labels = answer.probs[row].sort(descending=True, stable=True)
    pairs = zip(labels[:top].tolist(), values[:top].tolist(), strict=True)
    return [(label, share) for label, share in pairs if share > 0]


def _set(members: Tensor, words: Callable[[int], str], sets: ConformalSets | None) -> str:
    named = ", ".join(words(label) for label in members.nonzero()[:, 0].tolist()) or "empty"
    promise = "" if sets is None else f" for {100 * (1 - sets.alpha):g} %"
    return f"prediction set{promise}: {named}"


def _time(seconds: float) -> str:
    """A duration as people say it.

    >>> _time(0.00052), _time(0.0123), _time(2.5)
    ('0.52 ms', '12.3 ms', '2.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
