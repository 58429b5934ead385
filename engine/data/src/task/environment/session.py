# Environments of rollouts for Firebrick, as many as are asked for, each under a number.
#
# A class has the shape of TRL's environments: `reset(**row) -> str | None`, public methods with type hints and docstrings, which are
# the tools, and, where there is one, `get_reward() -> float | None`. Any of them may be `async def`.

import base64
import pickle
import random
import typing

# Public methods that are no tools.
NO_TOOLS = ["reset", "get_reward", "close"]
# Types as JSON schemas name them.
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object", type(None): "null"}


def tools_of(environment):
    """The tools of an environment by name: bound methods."""
    names = [name for name in dir(type(environment)) if not name.startswith("_") and name not in NO_TOOLS]
    return {name: getattr(environment, name) for name in names if inspect.isroutine(getattr(type(environment), name))}


def schema(name, method):
    """What chat templates are given of a tool, as transformers' `get_json_schema` writes it."""
    description, arguments, returns = documentation(name, method)
    hints = typing.get_type_hints(method)
    properties, required = {}, []
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise Refused(f"the tool `{name}` takes `{parameter}`; a tool's parameters are passed by name, each with a type")
        if parameter.name not in hints:
            raise Refused(f"the parameter `{parameter.name}` of the tool `{name}` has no type hint")
        if parameter.name not in arguments:
            raise Refused(
                f"the docstring of the tool `{name}` does not describe `{parameter.name}`; write `{parameter.name}: …` under `Args:`"
            )
        found, words = type_of(name, hints[parameter.name]), arguments[parameter.name]
        before, choices, after = words.rpartition("(choices:")
        if choices and after.rstrip().endswith(")"):
            found, words = {**found, "enum": json.loads(after.rstrip()[:-1])}, before.strip()
        properties[parameter.name] = {**found, "description": words}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    function = {"name": name, "description": description, "parameters": parameters}
    if returns is not None and "return" in hints:
        function["return"] = {**type_of(name, hints["return"]), "description": returns}
    return {"type": "function", "function": function}


def documentation(name, method):
    """Description, arguments and return value as a docstring in Google's format has them."""
    text = inspect.getdoc(method)
    if not text or not text.strip():
        raise Refused(f"the tool `{name}` has no docstring; describe the tool in it and, under `Args:`, its parameters")
    sections, current = {"": []}, ""
    for line in text.splitlines():
        word = line.strip().rstrip(":")
        if line.strip().endswith(":") and not line.startswith(" ") and word in ("Args", "Arguments", "Returns", "Raises", "Yields", "Examples", "Example", "Note"):
            current = "Args" if word == "Arguments" else word
            sections[current] = []
        else:
            sections[current].append(line)
    arguments, last = {}, None
    lines = sections.get("Args", [])
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for line in lines:
        head, colon, rest = line.strip().partition(":")
        if len(line) - len(line.lstrip()) == indent and colon:
            last = head.partition("(")[0].strip()
            arguments[last] = rest.strip()
        elif last is not None and line.strip():
            arguments[last] = (arguments[last] + " " + line.strip()).strip()
    returns = " ".join(line.strip() for line in sections["Returns"] if line.strip()) if "Returns" in sections else None
    description = "\n".join(sections[""]).strip()
    return description, arguments, returns


def type_of(tool, hint):
    """The JSON schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any or hint is inspect.Parameter.empty:
        return {}
    if hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is typing.Literal:
        kinds = sorted({TYPES.get(type(value), "string") for value in inner})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is typing.Union or (hasattr(types, "UnionType") and isinstance(hint, types.UnionType)):
        some = [type_of(tool, one) for one in inner if one is not type(None)]
        if len(some) == 1:
            found = some[0]
        elif all(list(one) == ["type"] and isinstance(one["type"], str) for one in some):
            found = {"type": sorted(one["type"] for one in some)}
        else:
            found = {"anyOf": some}
        return {**found, "nullable": True} if type(None) in inner else found
    if origin in (list, tuple):
        elements = [one for one in inner if one is not Ellipsis]
        return {"type": "array", **({"items": type_of(tool, elements[0])} if len(elements) == 1 else {})}
    if origin is dict:
        return {"type": "object", **({"additionalProperties": type_of(tool, inner[1])} if len(inner) == 2 else {})}
    raise Refused(f"the tool `{tool}` has a parameter of the type {hint}, which is none of JSON: use str, int, float, bool, list or dict")


class Sessions:
    """The environments of this process."""

    def __init__(self, opening, loop):
        self.file, self.module = opening["file"], load(opening["file"])
        self.make = find(self.module, opening["name"], "class", inspect.isclass)
        self.kwargs, self.loop = opening["kwargs"], loop
        self.environments = {}
        sample = self.make(**self.kwargs)
        if not callable(getattr(sample, "reset", None)):
            raise Refused(f"`{opening['name']}` makes {type(sample).__name__} objects, which have no method `reset(**row)`")
        self.has_reward = callable(getattr(sample, "get_reward", None))
        self.tools = [schema(name, method) for name, method in tools_of(sample).items()]

    def done(self, value):
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def handle(self, request):
        number_of, what = request["environment"], request["op"]
        if what == "close":
            self.close(self.environments.pop(number_of, None))
            return None
        if what == "reset":
            return self.asked(self.make, lambda: self.reset(number_of, request["start"]))
        environment = self.environments[number_of]
        if what == "reward":
            return self.asked(environment.get_reward, lambda: self.reward(environment))
        if what == "object":
            return {"object": self.copy_of(environment)}
        tools = tools_of(environment)
        return {"results": [self.call(tools, **call) for call in request["calls"]]}

    def asked(self, function, ask):
        """What the user's code says; where it fails, an error that names the function that was called."""
        try:
            return ask()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return {"error": failed(error, function)}

    def reset(self, number_of, start):
        if start["seed"] is not None:
            seed(start["seed"])
        environment = self.environments[number_of] = self.make(**self.kwargs)

        def begin():
            text = self.done(environment.reset(**start["row"]))
            if text is not None and not isinstance(text, str):
                raise Misused(f"returned {type(text).__name__}, expected str or None")
            return {"text": text}

        return self.asked(environment.reset, begin)

    def reward(self, environment):
        reward = self.done(environment.get_reward())
        return {"reward": None if reward is None else number(reward)}

    def close(self, environment):
        if callable(getattr(environment, "close", None)):
            try:
                self.done(environment.close())
            except Exception as error:
                print(told(error))

    def copy_of(self, environment):
        """What another process makes a copy of an environment from, or why it cannot."""
        try:
            copied = base64.b64encode(pickle.dumps(environment)).decode("ascii")
        except Exception as error:
            name = type(environment).__name__
            return {"error": f"`environments` are copies made with pickle, and an object of `{name}` cannot be pickled: {error}"}
        return {"file": self.file, "module": self.module.__name__, "pickle": copied}

    def call(self, tools, name, arguments):
        """What a tool says. One that raises says so to the model, as in TRL."""
        if name not in tools:
            return {"error": f"there is no tool {name!r}; there are {', '.join(tools) or 'none'}"}
        try:
            return {"content": str(self.done(tools[name](**arguments)))}
        except Exception as error:
            print(told(error))
            return {"error": str(error) or type(error).__name__}


def seed(number):
    """Seeds what environments draw at random."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def begin(opening, loop):
    sessions = Sessions(opening, loop)
    return {"tools": sessions.tools, "has_reward": sessions.has_reward}, sessions.handle


serve(begin)
