"""Two processes that wait, as a program for test_parallel.py: before they train (`start`) or in the leader's loop (`loop`)."""

from __future__ import annotations

import sys
import time
from typing import Any

from anytime.process import run_program
from anytime.train.parallel import Team, launch
from anytime.train.stopping import Stopping


def wait(where: str, team: Team) -> Any:
    if where == "start":
        if team.rank == 0:
            print("waiting", flush=True)
        time.sleep(300)
    if team.rank == 0:
        with Stopping() as stopping:
            print("waiting", flush=True)
            while not stopping.asked():
                time.sleep(0.01)
        team.tell(0)
        return stopping.reason
    team.hear()
    return None


def main() -> int:
    print(launch(2, wait, sys.argv[1], after_ctrl_c=lambda reason: f"Ctrl-C: {reason}"), flush=True)
    return 1


if __name__ == "__main__":
    run_program(main)
