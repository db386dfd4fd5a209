"""Risk control for an exit threshold: stop at the first confidence above λ, with a guarantee on the quality lost by stopping.

The loss compares the prediction at the exit with that of the last exit; λ = 1 never stops early and loses nothing. λ is
the smallest value of a grid that the method allows on calibration rows:

- `naive`: the mean loss is below ε. No guarantee.
- `crc`, conformal risk control: the expected loss of a future input is at most ε, on average over the calibration rows.
- `ucb`: an upper confidence bound by betting (Waudby-Smith and Ramdas) is below ε for every λ from 1 down.
- `ltt`, Learn then Test: Hoeffding–Bentkus p-values of "the risk is above ε" are at most δ for every λ from 1 down.

The last two guarantee a risk of at most ε with probability 1 - δ over the calibration rows. They walk down the grid and stop at
the first failure, so only the first λ with too large a risk must not pass: neither monotonicity nor a correction for the
size of the grid is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anytime.checks import as_tensor, check_choice, check_costs, check_labels, check_number
from anytime.combine import Rule, parse_rule
from anytime.errors import LabelError, OptionError, ShapeError
from anytime.metrics import brier
from anytime.policy.stopping import Confidence, FittedPolicy, Policy, as_log_odds, check_prediction
from anytime.threads import one_thread_for_few

Loss = Literal["gap", "consistency", "brier-gap", "brier-consistency", "hellinger"]
Method = Literal["naive", "crc", "ucb", "ltt"]

LARGEST: Mapping[str, float] = {"gap": 1, "consistency": 1, "brier-gap": 2, "brier-consistency": 2, "hellinger": 1}
"""B: the upper bound of each loss."""

_NEED_LABELS = ("gap", "brier-gap")
_BINARY = ("gap", "consistency")
_GRID = tuple(step / 100 for step in range(100, -1, -1))
_BISECTIONS = 50


@dataclass(frozen=True)
class RiskControl(FittedPolicy, kind="risk-control", version=2, oldest=1):
    """An exit threshold, how it was chosen, and its guarantee.

    Attributes:
        loss: The controlled loss, see `exit_losses`.
        method: `naive`, `crc`, `ucb` or `ltt`.
        epsilon: The risk that is allowed.
        delta: The probability that it is exceeded; None for `naive` and `crc`.
        envelope: Whether each row's loss was its largest at any threshold as high or higher.
        rows: The number of calibration rows.
        threshold: λ; 1, the full model, if none passed.
        passed: Whether any λ passed.
        grid: The λ that were tried, from high to low.
        risks: The mean loss at each.
        bounds: What was compared at each with ε (the mean, CRC's corrected mean, the upper bound) or δ (the p-value).
        mean_exits: The mean exit, counted from 1, at each.
        mean_exit: The mean exit at λ.
        mean_cost: The mean cost at λ, or None without costs.
        text: The rule whose predictions it was fitted on, as text, if known.
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
    text: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self.loss, self.method, self.epsilon, 0.5 if self.delta is None else self.delta)
        check_number(self.threshold, "threshold", low=0, most=1)
        if len({len(path) for path in (self.grid, self.risks, self.bounds, self.mean_exits)}) != 1:
            raise OptionError(
                "grid, risks, bounds and mean_exits differ in length",
                expected="one entry per λ of the grid",
                fix="fit it again",
            )
        _ = self.rule  # refuses a text that cannot be parsed

    @property
    def rule(self) -> Rule[Any] | None:
        """The rule whose predictions it was fitted on, if known; a `Runner` uses it by default and refuses another."""
        return None if self.text is None else parse_rule(self.text)

    @property
    def policy(self) -> Policy:
        """Stop at the first confidence above λ."""
        return Confidence(self.threshold, strict=True)

    @property
    def guarantee(self) -> str:
        """What holds for future inputs from the same source, in one sentence."""
        if not self.passed:
            return f"No threshold passed on {self.rows} rows: every input runs to the last exit, which loses nothing."
        what = "the accuracy lost by stopping early" if self.loss == "gap" else f"the mean {self.loss} loss"
        risk = f"{what} is at most {self.epsilon:g}"
        match self.method:
            case "naive":
                return f"No guarantee: on the {self.rows} calibration rows {risk}."
            case "crc":
                condition = "" if self.envelope else ", if stopping earlier never loses less"
                return f"On average over samples of {self.rows} calibration rows, {risk}{condition}."
        return f"With probability {1 - (self.delta or 0):g} over the sample of {self.rows} calibration rows, {risk}."


@one_thread_for_few
def fit_risk_control(
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
    """Choose the smallest exit threshold whose risk is controlled.

    Args:
        log_probs: A rule's predictions at all exits on calibration rows, `rule(logits)`, or their log-probabilities,
            `(exits, rows, classes)`. `ucb` bets on the rows in order, so the order must be independent of their content.
        labels: `(rows,)`; needed for `gap` and `brier-gap`.
        loss: The controlled loss, see `exit_losses`.
        epsilon: The risk that is allowed, above 0 and below the largest loss.
        delta: The probability that it is exceeded, for `ucb` and `ltt`.
        method: `naive`, `crc`, `ucb` or `ltt`.
        grid: The λ to try, from 0 to 1; by default 1, 0.99, …, 0.
        envelope: Use each row's largest loss at any threshold as high or higher. `crc` needs losses that only grow when
            stopping earlier, which these do not always; the envelope makes its guarantee hold regardless, at some cost.
        costs: The cumulative cost of each exit, to report the mean cost at λ.

    Example:
        >>> from anytime import Caching, samples
        >>> log_probs = Caching()(samples.cifar100_msdnet().logits[:]).log_probs
        >>> control = fit_risk_control(log_probs, loss="consistency", epsilon=0.05)
        >>> control.threshold, round(control.mean_exit, 2)
        (0.96, 2.7)
        >>> control.guarantee
        'With probability 0.9 over the sample of 1000 calibration rows, the mean consistency loss is at most 0.05.'
    """
    _check_options(loss, method, epsilon, delta)
    answers = check_prediction(log_probs, rows=True)
    exits, rows, classes = answers.log_probs.shape
    device = answers.log_probs.device
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
    """The loss of each input from stopping at each exit rather than the last, `(exits, batch)` in float64.

    Args:
        log_probs: A rule's predictions at all exits, `rule(logits)`, or their log-probabilities, `(exits, batch, classes)`.
        labels: `(batch,)`; only used for `gap` and `brier-gap`.
        loss: `gap`: 1 where the prediction is wrong and the last exit's is right, -1 in the opposite case, else 0.
            `consistency`: 1 where the predictions differ. `brier-gap`: the increase of the Brier score. `brier-consistency`:
            the same with the last exit's prediction as the label. `hellinger`: the Hellinger distance of both distributions.
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
    """An upper bound on the mean of losses of at most `largest`, valid with probability 1 - `delta`; at least 0.

    A bettor stakes on the mean being less than μ; the bound is the smallest μ against which the capital ever reached 1/δ.
    Stakes depend on earlier rows only, so the capital against the true mean is a martingale.

    Args:
        losses: `(..., rows)`, independent samples in the order they are bet on.
        delta: The probability of a bound below the mean.
        largest: The upper bound of a loss; there is no lower bound.
    """
    x = _check_samples(losses, largest)
    check_number(delta, "delta", above=0, below=1)
    rows = x.shape[-1]
    counts = torch.arange(2, rows + 2, device=x.device)
    mean = (0.5 + x.cumsum(-1)) / counts
    variance = (0.25 + (x - mean).square().cumsum(-1)) / counts
    before = torch.cat((torch.full_like(x[..., :1], 0.25), variance[..., :-1]), -1)
    stake = (2 * math.log(1 / delta) / (rows * before)).sqrt().clamp(max=1 / largest)
    low, high = torch.zeros_like(x[..., 0]), torch.full_like(x[..., 0], largest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        capital = torch.log1p(-stake * (x - middle[..., None])).cumsum(-1).amax(-1)
        refuted = capital >= math.log(1 / delta)
        low, high = torch.where(refuted, low, middle), torch.where(refuted, middle, high)
    return high


def hoeffding_bentkus(losses: Tensor, epsilon: float, *, largest: float = 1.0, binary: bool = False) -> Tensor:
    """A p-value of the null hypothesis that the mean loss is above ε.

    Args:
        losses: `(..., rows)`, independent samples of at most `largest`; negative ones count as 0, which only makes p larger.
        epsilon: ε, above 0 and below `largest`.
        largest: The upper bound of a loss.
        binary: Whether a loss is either 0 (or negative) or `largest`; the p-value is then the exact binomial one.
    """
    scaled = _check_samples(losses, largest).clamp(min=0) / largest
    check_number(epsilon, "epsilon", above=0, below=largest)
    rows, rate = scaled.shape[-1], epsilon / largest
    total = scaled.sum(-1)
    if binary:
        return _binomial(total.round(), rows, rate)
    tail = _binomial((total - 1e-9).ceil(), rows, rate)  # rounding must not push a whole sum up to the next number
    mean = (total / rows).clamp(max=rate)
    distance = torch.xlogy(mean, mean / rate) + torch.xlogy(1 - mean, (1 - mean) / (1 - rate))
    return torch.minimum((-rows * distance).exp(), math.e * tail)


def _binomial(counts: Tensor, rows: int, rate: float) -> Tensor:
    """The probability of at most `counts` successes among `rows` at this rate."""
    from scipy.stats import binom

    return torch.as_tensor(binom.cdf(counts.cpu().numpy(), rows, rate), device=counts.device)


def _exits(log_odds: Tensor, limits: Tensor) -> Tensor:
    """The index of the exit at which each row stops under each λ, `(grid, rows)`: the number of exits that do not exceed λ."""
    highest = log_odds[:-1].cummax(0).values if len(log_odds) > 1 else log_odds[:0]
    return (highest <= limits[:, None, None]).sum(1)


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
    check_number(delta, "delta", above=0, below=1)


def _check_samples(losses: Tensor, largest: float) -> Tensor:
    samples = as_tensor(losses, "losses").double()
    if samples.ndim == 0 or samples.shape[-1] == 0:
        raise ShapeError(
            f"losses have shape {tuple(samples.shape)}", expected="(..., rows), at least one row", fix="pass more rows"
        )
    if not bool((samples <= largest + 1e-9).all()):  # NaN fails too
        raise OptionError(
            f"losses reach {float(samples.max()):g}", expected=f"losses of at most {largest:g}, not NaN", fix="pass largest="
        )
    return samples.clamp(max=largest)


def _check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    values = tuple(sorted({float(value) for value in grid}, reverse=True))
    if not values or not all(0 <= value <= 1 for value in values):
        raise OptionError(
            f"grid is {grid!r}", expected="numbers from 0 to 1", fix="pass grid=(1.0, 0.9, 0.8), or None for 1, 0.99, …, 0"
        )
    return values
