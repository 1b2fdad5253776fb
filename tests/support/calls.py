"""What a call does in Python, for the tests of calls that must do little; and calls in another thread."""

from __future__ import annotations

import contextvars
import sys
import threading


def functions_entered(function, *args, **kwargs):
    """The names of the Python functions that a call enters, without comprehensions, which are none in newer Pythons."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return [name for name in names if name != "<listcomp>"]


def in_thread(call):
    """Run call() in another thread, with the settings of this one; return what it returned, or the error it raised."""
    answers = []

    def target():
        try:
            answers.append(call())
        except Exception as error:  # handed to the test
            answers.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,))
    thread.start()
    thread.join(60)
    return answers[0]
