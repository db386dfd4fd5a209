"""The verbs as one application of cyclopts, which reads the arguments and writes the help."""

from __future__ import annotations

from collections.abc import Sequence

from cyclopts import App, CycloptsError

from anytime import __version__
from anytime.cli import VERBS
from anytime.cli.console import make_console
from anytime.errors import AnytimeError

app = App(
    name="anytime",
    help="Multi-exit neural networks that answer by a deadline, with answers that get better, not worse, with more time.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
for _verb, _help in VERBS.items():
    app.command(f"anytime.cli.{_verb}:{_verb}", name=_verb, help=_help)


def call(arguments: Sequence[str]) -> int:
    """Call the verb that the arguments name; give its exit code."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False, console=make_console())
    except CycloptsError as error:
        verb = next((word for word in arguments if not word.startswith("-")), "")
        usage = f"anytime {verb} --help" if verb in VERBS else "anytime --help"
        came = " ".join(str(error).split())
        raise AnytimeError(came, expected="a call as its help describes", fix=f"see '{usage}'") from error
    return code if isinstance(code, int) else 0
