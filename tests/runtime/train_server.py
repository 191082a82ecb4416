"""Runs training commands one by one, each in a process forked from one that has all modules loaded.

One JSON request a line: ``args`` of the command, ``phase`` to halt in, ``out`` for its output. The
answers, a line each: the process's number as soon as it runs, and its exit code once it has ended.
"""

import json
import os
import sys
import threading
import time

import matplotlib.pyplot  # noqa: F401

import runtime.dflash.start.initialise
import runtime.dflash.trainee
import runtime.evaluate
import runtime.export
import runtime.static.artifacts
import runtime.target.model
import runtime.training.inputs
import runtime.training.job
import runtime.training.picture
import runtime.training.recorder
from runtime.static.graph import StaticStep
from runtime.train import main

PHASES = {
    "none": None,
    "loading": (runtime.target.model.Target, "load", 60.0),
    "warm-up": (StaticStep, "warm_up", 60.0),
    "pause": (runtime.target.model.Target, "load", 1.0),
    "save": (runtime.training.recorder, "save_checkpoint", 1.0),
    "export": (runtime.dflash.trainee, "save_published", 60.0),
}


def halt_in(owner, name, seconds):
    function = getattr(owner, name)

    def halting(*args, **kwargs):
        print("halted", file=sys.stderr, flush=True)
        time.sleep(seconds)
        return function(*args, **kwargs)

    setattr(owner, name, halting)


def become_command(request):
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if PHASES[request["phase"]] is not None:
        halt_in(*PHASES[request["phase"]])
    try:
        main(request["args"])
    except SystemExit as ending:
        left = [t for t in threading.enumerate() if t is not threading.main_thread()]
        print(f"threads left: {left}", file=sys.stderr, flush=True)
        # Freeing all modules in the fork takes seconds and is no part of the command.
        os._exit(ending.code or 0)


def serve(target):
    # Loads the rest of what a command imports.
    runtime.target.model.Target.load(target)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_command(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
