"""A server that gives every caller the best answer by its deadline: Open Inference Protocol over HTTP, around one runner.

`service` is the model, `oip` the protocol, `people` the plain endpoint, `limits`, `security` and `metrics` what their names
say, `application` the routes, `page` what a browser shows, and `server` the process. Which request runs when is decided in
`anytime.run`.
"""

from anytime.serve.application import make_app
from anytime.serve.limits import Limits
from anytime.serve.server import listen, make_server, run
from anytime.serve.service import Service, open_service

__all__ = ["Limits", "Service", "listen", "make_app", "make_server", "open_service", "run"]
