"""What programs for Firebrick have in common: one request a line comes in, one answer a line goes out.

Requests come on what was stdin, answers go to what was stdout. The user's code sees neither: its stdin is empty, and what it prints
goes to stderr. It runs in the main thread, so that its signal handlers work, and one event loop serves all calls. When requests end,
because the trainer is done or was killed, this process and all that it started end too.
"""

import ast
import asyncio
import atexit
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
import types

# Seconds that a call has to end in after requests have ended.
GRACE = 2.0


# Files that were loaded, the packages that they are in, which are the user's even where they are installed, and the folders that they are
# imported from.
LOADED = set()
OWN = set()
ROOTS = set()
# Folders of what is installed, and Python's.
INSTALLED = {"site-packages", "dist-packages"}
STDLIB = os.path.dirname(os.path.realpath(os.__file__)) + os.sep


class Refused(Exception):
    """The user's code cannot be used; the message says why."""


class Misused(Exception):
    """The user's code returned what it may not; the message says what."""


class NotFinite(Misused):
    """The user's code returned an infinite reward, or NaN."""


def load(file):
    """Imports a file: of a package under its dotted name, so that relative imports work, else as `python FILE` has it, with its folder on
    `sys.path`. It is never `__main__`."""
    file = os.path.abspath(file)
    refuse_start(file)
    own = folder = os.path.dirname(file)
    parts = [os.path.splitext(os.path.basename(file))[0]]
    while os.path.isfile(os.path.join(folder, "__init__.py")) and os.path.basename(folder):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    LOADED.add(file)
    ROOTS.add(os.path.realpath(folder))
    OWN.add(os.path.realpath(file if folder == own else os.path.join(folder, parts[0])))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if folder == own:
        # one of the standard library may have the name
        return execute("user_" + parts[0] if parts[0] in sys.modules else parts[0], file)
    # as with `python FILE`, it may name its neighbours without the package
    sys.path.append(own)
    if parts[-1] == "__init__":
        parts.pop()
    package, failed = None, None
    if parts[:-1]:
        try:
            package = importlib.import_module(".".join(parts[:-1]))
        except Exception as error:
            # a file that needs nothing of what its packages do can do without
            package, failed = bare(folder, parts[:-1]), error
    name = ".".join(parts)
    expected = os.path.join(folder, *parts[:-1])
    found = sys.modules.get(name)
    if package and expected not in map(os.path.abspath, getattr(package, "__path__", [])) or found and getattr(found, "__file__", None) != file:
        raise Refused(f"its name would be `{name}`, which is another module here; rename the folder {os.path.join(folder, parts[0])}")
    try:
        module = found or execute(name, file)
    except ImportError as error:
        # what the file itself lacks says more than what its packages lack
        raise failed if failed and not isinstance(error, ModuleNotFoundError) else error
    if package:
        setattr(package, parts[-1], module)
    return module


def bare(folder, parts):
    """Packages without what their `__init__.py` does."""
    for at, part in enumerate(parts):
        name, folder = ".".join(parts[: at + 1]), os.path.join(folder, part)
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [folder]
    return sys.modules[name]


def execute(name, file):
    """Runs a file as a module."""
    loader = importlib.machinery.SourceFileLoader(name, file)
    folders = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
    )
    sys.modules[name] = module  # so that what it defines can be pickled
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def refuse_start(file):
    """Refuses a file that starts a training when it is imported."""
    with open(file, "rb") as source:
        body = ast.parse(source.read(), file).body
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    run = [own for own in body if not isinstance(own, defined) and not (isinstance(own, ast.If) and "__name__" in ast.unparse(own.test))]
    for call in (part for own in run for part in ast.walk(own) if isinstance(part, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "train" and "rainer" in ast.unparse(call.func.value):
            raise Refused(f'line {call.lineno} starts a training when the file is loaded; put it under `if __name__ == "__main__":`')


def find(module, name, kind, is_one):
    """What a dotted name stands for in a module."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found
    own = [n for n, one in vars(module).items() if is_one(one) and getattr(one, "__module__", None) == module.__name__]
    raise Refused(f"there is no {kind} `{name}` in it; " + (f"its {kind}{'es' if kind[-1] == 's' else 's'} are {listed(own)}" if own else "it defines none"))


def number(value):
    """A value as a reward."""
    try:
        found = float(value)
    except Exception as error:
        raise Misused(f"returned {value!r:.80}, which is no reward: {error}") from None
    if not math.isfinite(found):
        raise NotFinite(f"returned {found}; rewards must be finite")
    return found


def plain(value):
    """A value as JSON has it: numbers of numpy and PyTorch too, text of what else there is; null for NaN and infinity."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
    return value if math.isfinite(value) else None


def listed(names):
    return ", ".join(f"`{name}`" for name in names) or "none"


def told(error):
    """An exception with its traceback, the frames of this file left out."""
    if isinstance(error, Refused):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f.filename != "<string>" and not f.filename.startswith("<frozen importlib")]
    lines = ["Traceback (most recent call last):\n"] + traceback.format_list(frames) if frames else []
    if isinstance(error, ModuleNotFoundError):
        advice = "\nset `python` to the interpreter of an environment that has it"
    elif isinstance(error, ImportError) and "no known parent package" in str(error):
        advice = "\nadd an empty `__init__.py` to the folder of the file"
    else:
        advice = ""
    return "".join(lines + traceback.format_exception_only(type(error), error)).rstrip() + advice


def is_users(file):
    """Whether a file is the user's: not this program's, not Python's, and not installed."""
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    for own in OWN:
        if path == own or path.startswith(own + os.sep):
            return not INSTALLED.intersection(path[len(own) :].split(os.sep))
    return not path.startswith(STDLIB) and not INSTALLED.intersection(path.split(os.sep))


def modules(seen):
    """Files of the user's modules that are new since the last look: those below the folders of the files that were loaded, which are apart."""
    files = (getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values()))
    new = {file for file in files if isinstance(file, str)} - seen
    seen.update(new)
    below = lambda file: any(os.path.realpath(file).startswith(os.path.join(root, "")) for root in ROOTS)
    new = {os.path.abspath(file) for file in new if is_users(file) and below(file) and os.path.isfile(file)}
    return sorted(new - LOADED)


def place(function):
    """Name of a function, and its file and line."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(getattr(type(function), "__call__", None), "__code__", None)
    name = f"`{getattr(function, '__qualname__', type(function).__name__)}`".replace("<locals>.", "")
    return name, f"({code.co_filename}, line {code.co_firstlineno})" if code else None


def failed(error, function, called=""):
    """What the user's code raised or returned: in which function, and where. Asked again, it would do so again."""
    name, where = place(function)
    if isinstance(error, (Misused, Refused)):
        found = " ".join(part for part in (name, where) if part)
        return f"{found}{':' if isinstance(error, Refused) else ''} {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if frames:
        where = f"({frames[-1].filename}, line {frames[-1].lineno})"
    lines = traceback.format_exception_only(type(error), error)
    what = next((line.strip() for line in lines if not line.startswith("  ")), type(error).__name__)
    return " ".join(part for part in (name, "raised", what, where, called) if part) + "\n" + told(error)


def leads():
    """Whether this process has a process group of its own, and not one that it was forked into."""
    return hasattr(os, "killpg") and os.getpgrp() == os.getpid()


def end_others():
    """Asks what this process has started and left behind to end. It ends by itself, and writes out what it has buffered."""
    if leads():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def listen(requests, calls):
    """Hands requests on; where they have ended, ends a call that does not end by itself."""
    for line in requests:
        calls.put(line)
    calls.put(None)
    time.sleep(GRACE)
    if leads():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def channels():
    """The two ends of the conversation, out of the function's reach."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    # what is no text, such as half of a surrogate pair, is written as `?`
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", newline="\n")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def serve(begin):
    """Answers requests. `begin` gets the first and the loop, and gives what is called with the others. An answer names the user's modules
    that were imported since the last."""
    requests, answers = channels()
    atexit.register(end_others)  # the first to be registered is the last to run
    calls = queue.SimpleQueue()
    threading.Thread(target=listen, args=(requests, calls), daemon=True).start()

    seen = set()

    def answer(value):
        sys.stdout.flush()
        new = modules(seen)
        answers.write(json.dumps({**value, "modules": new} if new else value, ensure_ascii=False) + "\n")
        answers.flush()

    opening = calls.get()
    if opening is None:
        return
    loop = asyncio.new_event_loop()
    try:
        ready, handle = begin(json.loads(opening), loop)
    except BaseException as error:
        answer({"refused": told(error)})
        return
    answer(ready)
    asyncio.set_event_loop(loop)
    while (line := calls.get()) is not None:
        request = json.loads(line)
        try:
            said = handle(request)
        except KeyboardInterrupt:
            raise  # from outside: nothing that the user's code did
        except BaseException as error:
            said = {"error": told(error)}
        if said is not None:
            answer({"id": request["id"], **said})


