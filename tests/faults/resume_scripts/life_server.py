"""Runs functions of `lives` in forked processes, which need not import anything.

Commands are lines of JSON: {"life": name, "arguments": {...}, "output": path} is answered with the process id, and
{"wait": pid, "seconds": limit} with the exit code (negative: the signal), or null if the process is still running.
"""

import faulthandler
import json
import os
import sys
import time
import traceback

import lives


def begin(command):
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with open(command["output"], "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    return None


def wait(pid, seconds):
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.002)


def serve():
    """Answer commands until the end of the input; in a forked process, return its command."""
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            answer = wait(command["wait"], command["seconds"])
        else:
            answer = begin(command)
            if answer is None:
                return command
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    faulthandler.enable()
    lives.warm_up()
    print(json.dumps("ready"), flush=True)
    order = serve()
    if order is not None:  # ends like any program, with the interpreter's shutdown
        try:
            getattr(lives, order["life"])(**order["arguments"])
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            raise
