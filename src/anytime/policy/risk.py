"""Risk control for an exit threshold: stop at the first confidence above λ, with a promise on what stopping costs in quality.

The loss compares the answer at the exit taken with that of the last exit; λ = 1 never stops early and loses nothing. λ is
chosen from a grid on calibration rows, as small as the method allows:

- `naive`: the mean loss is below ε. No promise.
- `crc`, conformal risk control: the expected loss of a future input is at most ε, on average over the calibration rows.
- `ucb`: an upper confidence bound by betting (Waudby-Smith and Ramdas) stays below ε, for every λ down from 1.
- `ltt`, Learn then Test: Hoeffding–Bentkus p-values of "the risk is above ε" are at most δ, for every λ down from 1.

The last two promise a risk of at most ε with probability 1 - δ over the calibration rows. They walk down and stop at the first
failure, so that only the first λ with too large a risk must not pass: no monotony is needed and no correction for the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anytime.checks import as_tensor, check_choice, check_costs, check_fraction, check_labels, check_number
from anytime.errors import LabelError, OptionError, ShapeError
from anytime.metrics import brier
from anytime.policy.stopping import Confidence, FittedPolicy, Policy, as_log_odds, check_prediction

Loss = Literal["gap", "consistency", "brier-gap", "brier-consistency", "hellinger"]
Method = Literal["naive", "crc", "ucb", "ltt"]

LARGEST: Mapping[str, float] = {"gap": 1, "consistency": 1, "brier-gap": 2, "brier-consistency": 2, "hellinger": 1}
"""B: what each loss is at most."""

_NEED_LABELS = ("gap", "brier-gap")
_BINARY = ("gap", "consistency")
_GRID = tuple(step / 100 for step in range(100, -1, -1))
_HALVINGS = 50


@dataclass(frozen=True)
class RiskControl(FittedPolicy, kind="risk control"):
    """An exit threshold, how it was chosen, and what is promised.

    Attributes:
        loss: What is controlled, see `exit_losses`.
        method: How, see this module.
        epsilon: The risk that is allowed.
        delta: The chance that it is exceeded; None for `naive` and `crc`, which do not know one.
        envelope: Whether each row's loss was the largest at any threshold as high or higher.
        rows: How many calibration rows there were.
        threshold: λ; 1, the full model, where none passed.
        passed: Whether a λ passed.
        grid: The λ that were tried, from high to low.
        risks: The mean loss at each.
        bounds: What was held against ε at each (the mean, CRC's corrected mean, the upper bound), or against δ (the p-value).
        mean_exits: The mean exit, counted from 1, at each.
        mean_exit: That at λ.
        mean_cost: The mean cost at λ, or None without costs.
    """

    loss: str
    method: str
    epsilon: float
    delta: float | None
    envelope: bool
    rows: int
    threshold: float
    passed: bool
    grid: tuple[float, ...]
    risks: tuple[float, ...]
    bounds: tuple[float, ...]
    mean_exits: tuple[float, ...]
    mean_exit: float
    mean_cost: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self.loss, self.method, self.epsilon, 0.5 if self.delta is None else self.delta)
        if not 0 <= self.threshold <= 1:
            raise OptionError(f"the threshold is {self.threshold}", expected="from 0 to 1", fix="fit it anew")
        if len({len(path) for path in (self.grid, self.risks, self.bounds, self.mean_exits)}) != 1:
            raise OptionError("the paths have different lengths", expected="one entry a λ of the grid", fix="fit it anew")

    @property
    def policy(self) -> Policy:
        """Stop at the first confidence above λ."""
        return Confidence(self.threshold, strict=True)

    @property
    def promise(self) -> str:
        """What holds for future inputs of the same kind, in one sentence."""
        if not self.passed:
            return f"No threshold passed on {self.rows} rows: every input runs to the last exit, which loses nothing."
        risk = f"the mean {self.loss} loss is at most {self.epsilon:g}"
        match self.method:
            case "naive":
                return f"Nothing is promised: on the {self.rows} calibration rows {risk}."
            case "crc" if self.envelope:
                return f"On average over draws of {self.rows} calibration rows, {risk}."
            case "crc":
                return f"On average over draws of {self.rows} calibration rows, {risk}, if stopping earlier never loses less."
        return f"With probability {1 - (self.delta or 0):g} over the draw of {self.rows} calibration rows, {risk}."


def control_risk(
    log_probs: Any,
    labels: Any = None,
    *,
    loss: Loss,
    epsilon: float,
    delta: float = 0.1,
    method: Method = "ucb",
    grid: Sequence[float] | None = None,
    envelope: bool = False,
    costs: Any = None,
) -> RiskControl:
    """Choose the smallest exit threshold whose risk is under control.

    Args:
        log_probs: A rule's answers at all exits on calibration rows, `rule(logits)`, or their log-probabilities,
            `(exits, rows, classes)`. `ucb` bets on the rows one after the other, so their order must have nothing to do with
            what they are.
        labels: `(rows,)`; needed for `gap` and `brier-gap`.
        loss: What is controlled, see `exit_losses`.
        epsilon: The risk that is allowed, above 0 and below the largest loss.
        delta: The chance that it is exceeded, for `ucb` and `ltt`.
        method: `naive`, `crc`, `ucb` or `ltt`.
        grid: The λ to try, from 0 to 1; by default 1, 0.99, …, 0.
        envelope: Take for each row the largest loss at any threshold as high or higher. `crc` needs losses that only grow
            when stopping earlier; these losses do not always, and this makes its promise hold all the same, at some cost.
        costs: What it costs to get to each exit, cumulative, to tell the mean cost at λ.

    Example:
        >>> from anytime import Caching, samples
        >>> log_probs = Caching()(samples.cifar100_msdnet().logits[:]).log_probs
        >>> control = control_risk(log_probs, loss="consistency", epsilon=0.05)
        >>> control.threshold, round(control.mean_exit, 2)
        (0.96, 2.7)
        >>> control.promise
        'With probability 0.9 over the draw of 1000 calibration rows, the mean consistency loss is at most 0.05.'
    """
    _check_options(loss, method, epsilon, delta)
    answers = check_prediction(log_probs)
    exits, rows, classes = answers.log_probs.shape
    device = answers.log_probs.device
    if rows == 0:
        raise ShapeError("there are no calibration rows", expected="at least one", fix="hold out more rows")
    lambdas = _GRID if grid is None else _check_grid(grid)
    limits = torch.tensor([as_log_odds(value) for value in lambdas], dtype=torch.float64, device=device)
    taken = _exits(answers.log_odds.double(), limits)
    losses = exit_losses(answers, labels, loss).gather(0, taken)
    if envelope:
        losses = losses.cummax(0).values
    risks = losses.mean(1)
    bounds = _bounds(losses, loss, method, epsilon, delta)
    passing = {"naive": bounds < epsilon, "crc": bounds <= epsilon, "ucb": bounds < epsilon, "ltt": bounds <= delta}[method]
    if method in ("ucb", "ltt"):
        passing = passing.cumprod(0).bool()
    found = int(passing.nonzero()[-1]) if bool(passing.any()) else None
    at = torch.full_like(taken[0], exits - 1) if found is None else taken[found]
    price = None if costs is None else check_costs(costs, exits=exits).to(device)
    return RiskControl(
        exits=exits,
        classes=classes,
        loss=loss,
        method=method,
        epsilon=float(epsilon),
        delta=float(delta) if method in ("ucb", "ltt") else None,
        envelope=envelope,
        rows=rows,
        threshold=1.0 if found is None else lambdas[found],
        passed=found is not None,
        grid=lambdas,
        risks=tuple(risks.tolist()),
        bounds=tuple(bounds.tolist()),
        mean_exits=tuple((1 + taken.double().mean(1)).tolist()),
        mean_exit=1 + float(at.double().mean()),
        mean_cost=None if price is None else float(price[at].mean()),
    )


def exit_losses(log_probs: Any, labels: Any, loss: Loss) -> Tensor:
    """What each input loses by stopping at each exit and not at the last, `(exits, batch)` in float64.

    Args:
        log_probs: A rule's answers at all exits, `rule(logits)`, or their log-probabilities, `(exits, batch, classes)`.
        labels: `(batch,)`; only read for `gap` and `brier-gap`.
        loss: `gap`: 1 where the answer is wrong and the last exit's is right, -1 the other way round, else 0. `consistency`: 1
            where the answers differ. `brier-gap`: how much larger the Brier score is. `brier-consistency`: the same with
            the last exit's answer for a label. `hellinger`: the Hellinger distance of the two distributions.
    """
    prediction = check_prediction(log_probs)
    answers, given = prediction.log_probs, prediction.labels
    check_choice(loss, "loss", get_args(Loss))
    if loss in _NEED_LABELS and labels is None:
        raise LabelError(
            f"got no labels for the loss {loss!r}",
            expected="one class index per input",
            fix="pass labels; 'consistency', 'brier-consistency' and 'hellinger' need none",
        )
    if loss == "consistency":
        return (given != given[-1]).double()
    if loss == "hellinger":
        roots = (answers.double() / 2).exp()
        return (roots - roots[-1]).square().sum(-1).sqrt() / math.sqrt(2)
    if loss == "brier-consistency":
        wanted = given[-1]
    else:
        wanted = check_labels(labels, batch=answers.shape[1], classes=answers.shape[2], device=answers.device)
    if loss == "gap":
        wrong = (given != wanted).double()
        return wrong - wrong[-1]
    probs = answers.double().exp()
    score = brier(probs.square().sum(-1), probs.gather(-1, wanted.expand(given.shape)[..., None])[..., 0])
    return score - score[-1]


def betting_bound(losses: Tensor, delta: float, *, largest: float = 1.0) -> Tensor:
    """An upper bound on the mean of losses of at most `largest`, valid with probability 1 - `delta`, from 0 on.

    A bettor stakes on the mean being less than μ; the bound is the smallest μ against which the capital has at some time been
    1/δ. Stakes only depend on the rows before, so the capital against the true mean is a fair game.

    Args:
        losses: `(..., rows)`, independent draws in the order they are bet on.
        delta: The chance of a bound below the mean.
        largest: What a loss is at most; there is no lower limit.
    """
    x = _check_draws(losses, largest)
    check_fraction(delta, "delta")
    rows = x.shape[-1]
    counts = torch.arange(2, rows + 2, device=x.device)
    mean = (0.5 + x.cumsum(-1)) / counts
    variance = (0.25 + (x - mean).square().cumsum(-1)) / counts
    before = torch.cat((torch.full_like(x[..., :1], 0.25), variance[..., :-1]), -1)
    stake = (2 * math.log(1 / delta) / (rows * before)).sqrt().clamp(max=1 / largest)
    low, high = torch.zeros_like(x[..., 0]), torch.full_like(x[..., 0], largest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        capital = torch.log1p(-stake * (x - middle[..., None])).cumsum(-1).amax(-1)
        refuted = capital >= math.log(1 / delta)
        low, high = torch.where(refuted, low, middle), torch.where(refuted, middle, high)
    return high


def hoeffding_bentkus(losses: Tensor, epsilon: float, *, largest: float = 1.0, binary: bool = False) -> Tensor:
    """A p-value for "the mean of these losses is above ε": small speaks against it.

    Args:
        losses: `(..., rows)`, independent draws of at most `largest`; negative ones count as 0, which only makes p larger.
        epsilon: ε, above 0 and below `largest`.
        largest: What a loss is at most.
        binary: Whether a loss is either 0 (or negative) or `largest`; the p-value is then the exact binomial one.
    """
    scaled = _check_draws(losses, largest).clamp(min=0) / largest
    check_number(epsilon, "epsilon", above=0, below=largest)
    rows, share = scaled.shape[-1], epsilon / largest
    total = scaled.sum(-1)
    if binary:
        return _binomial(total.round(), rows, share)
    tail = _binomial((total - 1e-9).ceil(), rows, share)  # a whole sum is not counted as one more for its rounding
    mean = (total / rows).clamp(max=share)
    distance = torch.xlogy(mean, mean / share) + torch.xlogy(1 - mean, (1 - mean) / (1 - share))
    return torch.minimum((-rows * distance).exp(), math.e * tail)


def _binomial(counts: Tensor, rows: int, share: float) -> Tensor:
    """The chance of at most so many hits among `rows`, each with the chance `share`."""
    from scipy.stats import binom

    return torch.as_tensor(binom.cdf(counts.cpu().numpy(), rows, share), device=counts.device)


def _exits(sure: Tensor, lambdas: Tensor) -> Tensor:
    """The index of the exit at which each row stops under each λ, `(grid, rows)`: the number of exits that do not exceed λ."""
    highest = sure[:-1].cummax(0).values if len(sure) > 1 else sure[:0]
    return (highest <= lambdas[:, None, None]).sum(1)


def _bounds(losses: Tensor, loss: str, method: str, epsilon: float, delta: float) -> Tensor:
    rows, largest = losses.shape[1], LARGEST[loss]
    match method:
        case "crc":
            return (losses.sum(1) + largest) / (rows + 1)
        case "ucb":
            return betting_bound(losses, delta, largest=largest)
        case "ltt":
            return hoeffding_bentkus(losses, epsilon, largest=largest, binary=loss in _BINARY)
    return losses.mean(1)


def _check_options(loss: str, method: str, epsilon: float, delta: float) -> None:
    check_choice(loss, "loss", get_args(Loss))
    check_choice(method, "method", get_args(Method))
    check_number(epsilon, "epsilon", above=0, below=LARGEST[loss])
    check_fraction(delta, "delta")


def _check_draws(losses: Tensor, largest: float) -> Tensor:
    draws = as_tensor(losses, "losses").double()
    if draws.ndim == 0 or draws.shape[-1] == 0:
        raise ShapeError(f"losses have shape {tuple(draws.shape)}", expected="(..., rows), a row or more", fix="give more rows")
    if not bool((draws <= largest + 1e-9).all()):  # NaN is refused too
        raise OptionError("some losses are larger, or NaN", expected=f"losses of at most {largest:g}", fix="say largest=")
    return draws.clamp(max=largest)


def _check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    values = tuple(sorted({float(value) for value in grid}, reverse=True))
    if not values or not all(0 <= value <= 1 for value in values):
        raise OptionError(f"the grid is {grid!r}", expected="numbers from 0 to 1", fix="leave grid out for 1, 0.99, …, 0")
    return values
