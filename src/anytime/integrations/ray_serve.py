"""The server of `anytime.serve` on a Ray cluster: many replicas behind one address, each with a scheduler of its own.

Ray Serve places, replaces and scales the replicas; admission, deadlines and batches stay with each replica's scheduler. Start
Ray with `RAY_SERVE_ENABLE_HA_PROXY=1`: HAProxy then sends requests straight to the replicas (docs/scaling.md has the times).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

from anytime.errors import MissingExtraError, OptionError, Overloaded
from anytime.loading.models import make_batch
from anytime.run import Budget, RunOptions
from anytime.run.budget import seconds

_HEALTH_SECONDS = 10.0
_HEALTH = {"health_check_period_s": _HEALTH_SECONDS, "health_check_timeout_s": 30.0, "graceful_shutdown_timeout_s": 40.0}


class Replica:
    """One model in one process of the cluster. Arguments are those of `make_application`."""

    def __init__(
        self,
        model: str | None,
        *,
        token_file: str | None,
        insecure: bool,
        allowed: Sequence[str],
        limits: Mapping[str, Any],
        deadline: Any,
        calibration: Sequence[str],
        options: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        import anytime
        from anytime.serve import Limits, open_service
        from anytime.serve.logs import set_up

        set_up()
        # Read here and not by the caller, so that the token is not stored in the cluster's state.
        self._token, self._allowed, self._limits = _token(token_file, insecure=insecure), allowed, Limits(**limits)
        if settings.get("profile") is not None:
            settings["profile"] = Path(settings["profile"])
        self.service = open_service(
            None if model is None else Path(model),
            deadline=seconds(deadline),
            longest=max(self._limits.deadline_seconds, seconds(deadline)),
            calibration=[anytime.load(path) for path in calibration],
            options=RunOptions(**{"nice": 5, **options}),
            **settings,
        )
        network = self.service.opened.model
        self._example = make_batch(network, 1)

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application that Ray calls; its end closes the runner."""
        from anytime.serve import make_app

        return make_app(self.service, limits=self._limits, host="0.0.0.0", allowed=self._allowed, token=self._token)

    async def check_health(self) -> None:
        """Run the first stage; Ray replaces a replica in which this fails or hangs."""
        with suppress(Overloaded):  # busy is not broken
            await self.service.runner.predict_async(self._example, budget=Budget(_HEALTH_SECONDS, exits=1))


def make_application(
    model: str | None = None,
    *,
    deadline: Any = "1s",
    token_file: str | None = None,
    insecure: bool = False,
    allowed: Sequence[str] = (),
    calibration: Sequence[str] = (),
    limits: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    ray: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A Ray Serve application, for `ray.serve.run`.

    Args:
        model: A folder that every node can read; None for the sample model.
        deadline: Time limit of requests that state none, such as `"20ms"`.
        token_file: A file on every node with the token that callers need; or the environment variable ANYTIME_TOKEN there.
        insecure: Answer without a token. Ray's HTTP proxies listen to all interfaces.
        allowed: The names that the Host header may have; any, if none is given.
        calibration: Files of fitted objects.
        limits: Arguments of `anytime.serve.Limits`.
        options: Arguments of `anytime.run.RunOptions`.
        ray: Options of `ray.serve.deployment`, such as `num_replicas`, `autoscaling_config` and `ray_actor_options`.
        settings: Further arguments of `anytime.serve.open_service`: `name`, `rule`, `data`, `engine`, `profile`, `trust`.
    """
    _token(token_file, insecure=insecure)  # fail here, not in a replica
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtraError(
            "Ray is not installed", expected="the extra ray", fix="pip install 'anytime-nn[ray]'"
        ) from error
    from anytime.serve import Limits

    in_flight, wanted = Limits(**(limits or {})).in_flight, dict(ray or {})
    actor = {"num_cpus": 1, **wanted.pop("ray_actor_options", {})}
    cpus = max(1, ceil(actor["num_cpus"]))
    if "num_replicas" not in wanted:
        wanted["autoscaling_config"] = {**_scaling(cpus), **wanted.get("autoscaling_config", {})}
    # The replica's own scheduler decides what waits and what is refused, so Ray must not.
    queues = {"max_ongoing_requests": in_flight, "max_queued_requests": in_flight}
    deployment = serve.deployment(**{"name": "anytime", **_HEALTH, **queues, **wanted, "ray_actor_options": actor})
    return deployment(serve.ingress()(Replica)).bind(
        model,
        deadline=deadline,
        token_file=token_file,
        insecure=insecure,
        allowed=tuple(allowed),
        calibration=tuple(calibration),
        limits=dict(limits or {}),
        options={"workers": cpus, "queue": in_flight, **(options or {})},
        **settings,
    )


def app(arguments: dict[str, Any]) -> Any:
    """As `make_application`, for `serve run anytime.integrations.ray_serve:app model=FOLDER` and for configuration files."""
    return make_application(**arguments)


def _scaling(cpus: int) -> dict[str, Any]:
    """Add a replica if more than two requests per core are in flight.

    With two, a request waits for its turn about as long as it runs: by Little's law the number in flight bounds the time in the
    queue, which Ray does not measure.
    """
    return {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 2 * cpus}


def _token(file: str | None, *, insecure: bool) -> str | None:
    from anytime.serve.security import VARIABLE, read_token

    token = read_token(None if file is None else Path(file))
    if token is None and not insecure:
        raise OptionError(
            "there is no token, and Ray's HTTP proxy listens to all interfaces",
            expected=f"token_file, or {VARIABLE} in the environment of every node",
            fix="pass token_file=FILE, or insecure=True if something else keeps strangers out",
        )
    return token
