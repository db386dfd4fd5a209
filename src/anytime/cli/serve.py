"""`anytime serve FOLDER --deadline 20ms`: an HTTP server that answers by deadlines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from anytime.cli.options import Flag
from anytime.safe_text import print_safely as print


def serve(
    model: Path | None = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    deadline: str = "1s",
    name: str | None = None,
    rule: str | None = None,
    calibration: Annotated[list[Path] | None, Parameter(negative=())] = None,
    data: str | None = None,
    engine: str = "auto",
    profile: Path | None = None,
    policy: Literal["gain", "least-progress", "earliest-deadline", "slack-fit", "all-exits"] = "gain",
    workers: int = 4,
    threads: int = 1,
    nice: int = 5,
    token_file: Path | None = None,
    allowed_host: Annotated[list[str] | None, Parameter(negative=())] = None,
    insecure: Flag = False,
    demo: Flag = False,
    examples: Path | None = None,
    max_body: int = 16,
    max_batch: int = 64,
    max_queue: int = 1024,
    max_streams: int = 64,
    drain: str = "30s",
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    build: str | None = None,
    trust: Flag = False,
) -> int:
    """Serve a model over HTTP: a page for people at /, /predict, the Open Inference Protocol and event streams.

    Args:
        model: A folder of `anytime.save`, of a training run, of a published run, or of `anytime export`, with what was saved in
            it; without it a small network for digits that comes with the package.
        host: The address to listen to. One that other machines can reach needs a token.
        port: The port; 0 for any free one.
        deadline: Time limit of requests that state none, such as 20ms.
        name: The name of the model in addresses; by default that of its folder.
        rule: How the exits are combined, such as latest, product or the file of a fitted rule; by default as for `anytime
            predict`.
        calibration: A file of a fitted object: temperatures, a fitted product, a tuned rule, prediction sets; repeatable.
        data: The training data, if the model's folder does not name it: cifar10, cifar100, imagenet or a run's data.json.
        engine: What runs the stages: eager, folded, onnxruntime, cuda-graphs, or auto for the fastest here.
        profile: The profile.json of `anytime profile`, as the first forecast.
        policy: Which request runs next; see docs/serving.md.
        workers: How many threads may run stages.
        threads: Number of threads per stage.
        nice: By how much the priority of these threads is lower than that of the server itself, 0 to 19 (Linux).
        token_file: A file with the token that callers need; or the environment variable ANYTIME_TOKEN.
        allowed_host: A further name that the Host header may have; repeatable.
        insecure: Listen to other machines without a token.
        demo: Let the page have the server send itself traffic, bounded, for its load view; without MODEL, on this machine, this
            is the default.
        examples: A folder of images to pick from on the page; those in a subfolder that is named as a class have that label.
        max_body: Largest body, in MiB.
        max_batch: Most inputs per request.
        max_queue: Most requests in flight.
        max_streams: Most event streams at once.
        drain: How long SIGTERM waits for what is in flight.
        log_level: What is logged to stderr, as one JSON object per line; debug has one per request.
        build: For a model of your own, package.module:function: makes it with any weights. The module is imported from the
            current folder, or is installed; code is never read from the model's folder.
        trust: Also load exported stages in the format torch-export. Such files can run any code; ONNX stages need no trust.
    """
    import anytime
    from anytime.checks import check_count
    from anytime.cli.rules import read_rule
    from anytime.combine.named import as_rule
    from anytime.errors import MissingExtraError
    from anytime.loading.models import import_function
    from anytime.run import RunOptions
    from anytime.run.budget import seconds

    try:
        from anytime import serve as server
        from anytime.serve import logs
        from anytime.serve.security import check_exposure, is_loopback, read_token
    except ImportError as error:
        raise MissingExtraError(
            f"the server needs {error.name}", expected="the extra serve", fix="pip install 'anytime-nn[serve]'"
        ) from error
    body = check_count(max_body, "--max-body", most=4096) << 20
    limits = server.Limits(body=body, held=max(256 << 20, 4 * body), batch=max_batch, in_flight=max_queue, streams=max_streams)
    token = read_token(token_file)
    check_exposure(host, token, insecure=insecure)
    options = RunOptions(schedule=policy, workers=workers, threads=threads, nice=nice, queue=max_queue)
    seconds_left, drained = seconds(deadline), seconds(drain)
    with server.listen(host, port) as listening:
        logs.set_up(log_level)
        print("anytime: building the engine and measuring the stages ...", file=sys.stderr)
        service = server.open_service(
            model,
            deadline=seconds_left,
            longest=max(limits.deadline_seconds, seconds_left),
            name=name,
            rule=None if rule is None else as_rule(read_rule(rule)),
            calibration=[anytime.load(path) for path in calibration or ()],
            data=data,
            engine=engine,
            profile=profile,
            options=options,
            build=import_function(build),
            trust=trust,
        )
        app = server.make_app(
            service,
            limits=limits,
            host=host,
            allowed=allowed_host or (),
            token=token,
            demo=demo or (model is None and is_loopback(host)),
            examples=examples,
        )
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        print(f"{service.name}: {service.exits} exits, rule {service.runner.rule!r}, engine {service.runner.engine.name}")
        listening.listen(limits.connections)  # from here on connections wait instead of being refused
        print(f"web page: {address}/")
        print(f"listening on {address}", flush=True)
        server.run(server.make_server(app, limits, drain=drained), listening)
    return 0
