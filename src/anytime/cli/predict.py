"""`anytime predict MODEL INPUT --deadline 5ms`: the answer at each exit, and the one by a deadline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from anytime.cli.options import Flag, print_json
from anytime.errors import DeadlineTooShort, Overloaded
from anytime.safe_text import print_safely as print
from anytime.safe_text import printable

if TYPE_CHECKING:
    from torch import Tensor

    from anytime.conformal import ConformalSets
    from anytime.run import Answer, Budget
    from anytime.run.engines import Engine

STOPPED = {
    "finished": "all exits are done",
    "deadline": "the deadline passed",
    "forecast": "the next exit was not expected in time",
    "exits": "the limit of --exits was reached",
    "macs": "the next exit would exceed --macs",
    "policy": "the saved policy stopped it",
}
_RUNS = 10  # that measure how long the stages take, before the timed one
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
    build: str | None = None,
    trust: Flag = False,
    json: Flag = False,
) -> int:
    """Run a model on an input: the answer at each exit, and the best one within a budget.

    Args:
        model: A folder of `anytime.save`, of a training run, of a published run, or of `anytime export`. What was saved in it,
            the rule, the calibration and the policy, is used.
        input: An image, or `.npy` or `.npz` with one input or a batch; for text models, a text or a `.txt` with one per line;
            for a model that takes several tensors, a `.npz` with an array for each.
        deadline: Time limit, such as 5ms; none by default.
        exits: Largest number of exits.
        macs: Largest number of MACs (multiply-accumulates) per input, such as 60e6.
        rule: How the exits are combined, such as latest, product or the file of a fitted rule; by default the saved rule or the
            one that the calibration was fitted for, or else the product, with fewer than five classes caching.
        engine: What runs the stages: eager, folded, onnxruntime, cuda-graphs, or auto for the fastest here.
        calibration: A file of a fitted object: temperatures, a fitted product, a tuned rule, prediction sets; repeatable.
        data: The training data, if the model's folder does not name it: cifar10, cifar100, imagenet or a run's data.json.
        threads: Number of threads per stage.
        top: How many classes of the final answer to show.
        build: For a model of your own, package.module:function: makes it with any weights. The module is imported from the
            current folder, or is installed; code is never read from the model's folder.
        trust: Also load exported stages in the format torch-export. Such files can run any code; ONNX stages need no trust.
        json: Print one JSON document instead of text.
    """
    import warnings

    import anytime
    from anytime.checks import check_count
    from anytime.cli.rules import read_rule
    from anytime.combine.advice import advise, default_rule
    from anytime.combine.named import as_rule
    from anytime.conformal import ConformalSets
    from anytime.data.description import Description
    from anytime.errors import FewClassesWarning
    from anytime.loading.inputs import read_input, short_name
    from anytime.loading.models import import_function, make_engine
    from anytime.models import measure_cost
    from anytime.run import Budget, open_folder
    from anytime.run.export import ExportedModel

    budget, named = Budget(time=deadline, macs=macs, exits=exits), None if rule is None else as_rule(read_rule(rule))
    check_count(top, "--top", fix="pass a whole number such as --top 3")
    opened = open_folder(model, data, build=import_function(build), threads=threads, trusted=trust)
    x, note = read_input(input, opened)
    fitted = tuple(anytime.load(path) for path in calibration or ())
    for each in fitted:
        each.check_fits(opened.model.num_exits, opened.classes)
    given = {**({} if named is None else {"rule": named}), **({"calibration": fitted} if fitted else {})}
    saved = opened.runner_arguments(**given, engine=engine)
    fitted, exported = saved.get("calibration") or (), isinstance(opened.model, ExportedModel)
    default = None if fitted or exported else default_rule(opened.known_classes)
    if note is not None:
        print(note, file=sys.stderr)
    made = make_engine(opened.model, engine, example=x, threads=threads)
    costs = None if macs is None or exported else measure_cost(opened.model, x).macs
    print(f"engine: {made.name} ({getattr(made, 'why', 'as requested')})", file=sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewClassesWarning)  # printed below instead
            answers, used = answer_stream(
                made,
                x,
                budget,
                rule=saved.get("rule", default),
                calibration=fitted,
                policy=saved.get("policy"),
                costs=costs,
            )
    except (DeadlineTooShort, Overloaded) as error:  # the queue refuses a deadline that only just fails
        if isinstance(error, Overloaded):
            least = f"{1e3 * (error.retry_after + (budget.time or 0.0)):.3g} ms"
            error.got, error.expected = f"a deadline of {deadline}, too short for the first exit", f"about {least} or more"
        error.fix = "allow more time with --deadline, or use a smaller network"
        print(f"anytime: {error}", file=sys.stderr)
        return 1
    if not fitted and opened.known_classes and (advice := advise(used, opened.classes)) is not None:
        print(f"anytime: {advice}", file=sys.stderr)
    words = (opened.data or Description(opened.name, (), ())).word
    head = {"model": opened.name, "input": short_name(input, opened), "engine": made.name, "rule": repr(used)}
    sets = next((each for each in fitted if isinstance(each, ConformalSets)), None)
    if json:
        print_json({**head, **document(answers, budget, words, top=top)})
    else:
        print(" · ".join(map(printable, head.values())) + "\n")
        print(growth(answers, words))
        print(outcome(answers, budget, words, top=top, sets=sets))
    return 0


def answer_stream(
    engine: Engine,
    x: Any,
    budget: Budget,
    *,
    rule: Any,
    calibration: Sequence[Any],
    policy: Any = None,
    costs: Sequence[float] | None = None,
) -> tuple[list[Answer], Any]:
    """One answer per exit within a budget, and the rule that gave them, after runs that warm up the stages.

    Args:
        engine: What runs the stages.
        x: The inputs, batch first.
        budget: The limits.
        rule: A rule, or None for the one that the calibration was fitted for.
        calibration: Fitted objects.
        policy: Lets inputs stop early.
        costs: MACs up to each exit, for a budget of MACs.
    """
    from anytime.checks import count_rows
    from anytime.run import Runner, RunOptions, profile_model

    profile = None if budget.time is None else profile_model(engine, x, batch_sizes=(count_rows(x),), repeats=_RUNS)
    fitted: dict[str, Any] = {"calibration": tuple(calibration), "policy": policy, "profile": profile, "macs": costs}
    with Runner(engine, rule, engine, options=RunOptions(threads=None), **fitted) as runner:
        for _ in runner.stream(x):  # a rule is slow the first time, too
            pass
        return list(runner.stream(x, budget=budget)), runner.rule


def reason(last: Answer) -> str:
    """Why the stages stopped. A stream yields its last answer before it knows that the deadline ends it."""
    return last.reason or ("forecast" if last.deadline_met else "deadline")


def growth(answers: Sequence[Answer], words: Callable[[int], str]) -> str:
    """One line per exit: the time, the answer and its confidence for one input; for a batch, how many answers changed."""
    single = len(answers[0].labels) == 1
    lines, before = [], None
    width = max(len(words(int(label))) for answer in answers for label in answer.labels) if single else 0
    for answer in answers:
        when = f"exit {answer.last_exit:>2}  {_time(answer.elapsed):>9}"
        confidence = float(answer.confidence.mean())
        if single:
            back = "  fell back" if bool(answer.fell_back) else ""
            lines.append(f"{when}  {words(answer.label):{width}}  {confidence:.3f} {bar(confidence)}{back}".rstrip())
        else:
            others = 0 if before is None else int((answer.labels != before).sum())
            changed = "" if before is None else f", {others} answer{'s' * (others != 1)} changed"
            back = f", {fell} fell back" if (fell := int(answer.fell_back.sum())) else ""
            lines.append(f"{when}  mean probability {confidence:.3f} {bar(confidence)}{changed}{back}")
        before = answer.labels
    return "\n".join([*lines, f"stopped: {STOPPED[reason(answers[-1])]}", ""])


def outcome(
    answers: Sequence[Answer], budget: Budget, words: Callable[[int], str], *, top: int, sets: ConformalSets | None = None
) -> str:
    """The final answer with its prediction set, and whether it met the deadline."""
    last = answers[-1]
    lines = []
    for row in range(min(len(last.labels), _ROWS)):
        fell = ", fell back" if bool(last.fell_back[row]) else ""
        number = f"input {row + 1}: " if len(last.labels) > 1 else ""
        place = f"exit {_exit(last, row)} of {last.exits}"
        lines.append(f"{number}{words(int(last.labels[row]))}, {float(last.confidence[row]):.3f}, from {place}{fell}")
        best = _best(last, row, top) if len(last.labels) == 1 else []
        width = max((len(words(label)) for label, _ in best), default=0)
        lines += [f"  {words(label):{width}}  {prob:.3f} {bar(prob)}".rstrip() for label, prob in best]
        if last.prediction_set is not None:
            lines.append(f"  {_set(last.prediction_set[row], words, sets)}")
    if len(last.labels) > _ROWS:
        lines.append(f"and {len(last.labels) - _ROWS} more; --json prints all")
    if budget.time is not None:
        met = "deadline met" if last.deadline_met else "deadline not met"
        lines.append(f"{met}: {_time(last.elapsed)} of {_time(budget.time)}")
    return "\n".join(lines)


def document(answers: Sequence[Answer], budget: Budget, words: Callable[[int], str], *, top: int) -> dict[str, Any]:
    """The JSON document; times are in seconds."""
    last = answers[-1]
    return {
        "inputs": len(last.labels),
        "exits": last.exits,
        "growth": [
            {
                "exit": answer.last_exit,
                "elapsed": answer.elapsed,
                "answers": [_row(answer, row, words) for row in range(len(answer.labels))],
            }
            for answer in answers
        ],
        "stopped": reason(last),
        "exit": last.last_exit,
        "elapsed": last.elapsed,
        "deadline": budget.time,
        "deadline_met": last.deadline_met,
        "answers": [
            {
                **_row(last, row, words),
                "exit": _exit(last, row),
                "top": [{"label": label, "name": words(label), "probability": prob} for label, prob in _best(last, row, top)],
                "set": None if last.prediction_set is None else last.prediction_set[row].nonzero()[:, 0].tolist(),
            }
            for row in range(len(last.labels))
        ],
    }


def bar(fraction: float) -> str:
    """A fraction between 0 and 1 as a bar of blocks.

    >>> bar(0.5), bar(0.01), bar(0)
    ('████████████', '▎', '')
    """
    full, part = divmod(round(8 * _WIDTH * fraction), 8)
    return ("█" * full + _PARTS[part]).rstrip()


def _row(answer: Answer, row: int, words: Callable[[int], str]) -> dict[str, Any]:
    label = int(answer.labels[row])
    return {
        "label": label,
        "name": words(label),
        "probability": float(answer.confidence[row]),
        "fell_back": bool(answer.fell_back[row]),
    }


def _exit(answer: Answer, row: int) -> int:
    return answer.exit if isinstance(answer.exit, int) else int(answer.exit[row])


def _best(answer: Answer, row: int, top: int) -> list[tuple[int, float]]:
    """The most probable classes, without those of probability zero."""
    values, labels = answer.probs[row].sort(descending=True, stable=True)
    pairs = zip(labels[:top].tolist(), values[:top].tolist(), strict=True)
    return [(label, prob) for label, prob in pairs if prob > 0]


def _set(members: Tensor, words: Callable[[int], str], sets: ConformalSets | None) -> str:
    named = ", ".join(words(label) for label in members.nonzero()[:, 0].tolist()) or "empty"
    coverage = "" if sets is None else f" for {100 * (1 - sets.alpha):g} %"
    return f"prediction set{coverage}: {named}"


def _time(seconds: float) -> str:
    """A duration in a readable unit.

    >>> _time(0.00052), _time(0.0123), _time(2.5)
    ('0.52 ms', '12.3 ms', '2.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
