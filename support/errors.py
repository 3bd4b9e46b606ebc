"""Mistakes of a user, which are shown in one line, and Ctrl-C."""
import contextlib
import os
import sys
import threading
from signal import SIGINT, signal

import torch

import envs


class UserError(Exception):
    """A mistake that the user can mend. On the command line its message is all that is shown."""


def need(condition, message):
    if not condition:
        raise UserError(message)


def one_line(error):
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def one_line_errors():
    """The command line shows the message of a mistake, without a traceback. Ctrl-C exits with 130.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal may not know all characters
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        yield
        if asked_to_stop():  # `train` has saved and returned early
            sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, envs.EnvError) as error:
        sys.exit(one_line(error))
    except BrokenPipeError:  # the output goes to a program that has ended, such as `head`
        os._exit(141)
    except (OSError, UnicodeEncodeError) as error:  # such as a full disk
        sys.exit(f"{type(error).__name__}: {one_line(error)}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"Out of memory ({one_line(error)}). The rollout needs less with a lower "
                 f"--prompts or --rollouts, the update with a lower --micro-tokens or with "
                 f"--algo grpo, both with a lower --max-new-tokens. A run that had begun goes on "
                 f"with --resume.")


def is_out_of_memory(error):  # torch raises a plain RuntimeError on a CPU
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error))


STOP = threading.Event()


def asked_to_stop():
    return STOP.is_set()


@contextlib.contextmanager
def ctrl_c_asks_to_stop():
    """Inside, Ctrl-C (or a notebook's Interrupt) only asks to stop. A second one stops at once."""
    STOP.clear()
    if threading.current_thread() is not threading.main_thread():  # Python forbids handlers there
        yield
        return
    old_handler = signal(SIGINT, ask_to_stop)
    try:
        yield
    finally:
        signal(SIGINT, old_handler)


def ask_to_stop(*_):
    if STOP.is_set():
        raise KeyboardInterrupt
    STOP.set()
    print("\nfinishing this iteration, then saving (Ctrl-C again: stop at once, as last saved)",
          file=sys.stderr)
