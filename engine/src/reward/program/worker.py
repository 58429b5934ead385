# Calls a reward function for Firebrick: one request a line comes in, one answer a line goes out.
#
# The function is one written for TRL or for verl, which its parameters tell apart:
#
#     TRL    f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, environments, **columns)
#                -> list[float | None], a group of completions at a time
#     verl   compute_score(data_source, solution_str, ground_truth, extra_info=None)
#                -> float | {"score": float, ...} | None, a completion at a time
#            compute_score(data_sources, solution_strs, ground_truths, extra_infos)
#                -> a list of these, a group of completions at a time
#
# Either may be `async def`.

import base64
import pickle

# What TRL passes beside the columns of the rows.
TRL = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"]
# What verl passes.
VERL = ["data_source", "solution_str", "ground_truth", "extra_info"]
# The same for a group, each a list (`reward_manager=batch`).
BATCH = {name + "s": name for name in VERL}
# Columns that TRL does not pass under their own names.
NOT_PASSED = ["prompt", "completion", "completion_ids"]


class Function:
    """A reward function, and how it is called."""

    def __init__(self, file, name, kwargs, arguments):
        self.function = made(load(file), name, arguments)
        self.kwargs = kwargs
        parameters = inspect.signature(self.function).parameters.values()
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self.takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.takes = [p.name for p in parameters if p.kind not in variadic]
        needs = [p.name for p in parameters if p.kind not in variadic and p.default is inspect.Parameter.empty]
        self.style = self.style_of(parameters)
        known = {"trl": TRL, "verl": VERL, "batch": BATCH}[self.style]
        # what is left has to be a column of the rows
        self.needs = [name for name in needs if name not in known and name not in kwargs]
        # the objects of a task's environments, which are in other processes: copies of them
        self.environments, self.names_environments = None, "environments" in self.takes
        if self.style == "trl" and "environments" not in kwargs:
            if self.names_environments:
                self.environments = "needs" if "environments" in needs else "takes"
            elif self.takes_any and mentions(self.function, "environments"):
                self.environments = "takes"
        if self.style != "trl" and self.needs:
            raise Refused(f"it needs {listed(self.needs)}, which verl's signature has not; give them in `kwargs`")
        unknown = [name for name in kwargs if not self.takes_any and name not in self.takes]
        if unknown:
            raise Refused(f"`kwargs` names {listed(unknown)}, but it takes {listed(self.takes)}")

    def style_of(self, parameters):
        by_name = all(p.kind != inspect.Parameter.POSITIONAL_ONLY for p in parameters)
        if by_name and "solution_str" in self.takes:
            return "verl"
        if by_name and "solution_strs" in self.takes:
            return "batch"
        if by_name and (self.takes_any or "completions" in self.takes or "completion_ids" in self.takes):
            return "trl"
        raise Refused(
            f"its parameters are {listed(self.takes)}; expected TRL's (completions, …, **kwargs) "
            "or verl's (data_source, solution_str, ground_truth, extra_info=None), to be passed by name; "
            "for a function that returns the reward function, set `arguments`, {} for none"
        )

    def columns(self):
        """The columns that it is given; None for all."""
        return None if self.takes_any else [name for name in self.takes if name not in TRL]

    def call(self, arguments):
        return self.function(**{k: v for k, v in arguments.items() if self.takes_any or k in self.takes})


def mentions(function, text):
    """Whether a function has a text among its constants, as in `kwargs["environments"]`."""

    def is_in(code):
        return any(constant == text or isinstance(constant, types.CodeType) and is_in(constant) for constant in code.co_consts)

    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(getattr(type(function), "__call__", None), "__code__", None)
    return code is not None and is_in(code)


def made(module, name, arguments):
    """The reward function of a name: a function, a method, an object of a class, or, with `arguments`, what the name returns."""
    named = lambda name: find(module, name, "function", inspect.isroutine)
    owner, _, method = name.rpartition(".")
    if owner and inspect.isclass(named(owner)) and inspect.isfunction(inspect.getattr_static(named(owner), method, None)):
        return getattr(returned(named(owner), owner, arguments), method)
    found = named(name)
    if inspect.isclass(found) or arguments is not None:
        found = returned(found, name, arguments)
    if not callable(found):
        raise Refused(f"`{name}` returns {type(found).__name__}, expected a function; `kwargs` are the arguments of the reward function")
    return found


def returned(make, name, arguments):
    arguments = arguments or {}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise Refused(f"`arguments` do not fit `{name}{inspect.signature(make)}`: {error}")
    return make(**arguments)


def reward_of(value):
    """A value as a reward: none for None and, as in TRL, for NaN, which both mean that it does not apply."""
    if value is None:
        return None
    try:
        missing = math.isnan(float(value))
    except Exception:
        missing = False  # it is no reward, as `number` says
    return None if missing else number(value)


def by_trl(function, request, loop):
    """Rewards of a group; what the function logs goes with its samples."""
    samples = request["samples"]
    notes = [{} for _ in samples]
    logged = {}

    def log_extra(column, values):
        values = list(values)
        if len(values) != len(samples):
            raise Misused(f"called log_extra({column!r}) with {len(values)} values for {len(samples)} completions")
        for note, value in zip(notes, values):
            note[str(column)] = plain(value)

    def log_metric(name, value):
        logged.setdefault(str(name), []).append(float(value))

    columns = {name: None for sample in samples for name in sample["row"] if name not in NOT_PASSED}
    arguments = {name: [sample["row"].get(name) for sample in samples] for name in columns}
    arguments.update(function.kwargs)
    arguments.update(
        prompts=[sample["prompt"] for sample in samples],
        completions=[sample["completion"] for sample in samples],
        completion_ids=[sample["completion_ids"] for sample in samples],
        trainer_state=types.SimpleNamespace(**request["trainer_state"]),
        log_extra=log_extra,
        log_metric=log_metric,
    )
    if function.environments:
        environments = copies([sample["environment"] for sample in samples])
        # as in TRL, one that takes all there is is told of none only where there are some
        if function.names_environments or environments is not None:
            arguments["environments"] = environments
    values = one_each(function.call(arguments), samples, loop)
    for name, seen in logged.items():
        for note in notes:
            note.setdefault(name, plain(sum(seen) / len(seen)))
    return [scored(value, note, function) for value, note in zip(values, notes)]


def one_each(values, samples, loop):
    """What a function returned of a group as a list with a value for each completion."""
    count = len(samples)
    if inspect.isawaitable(values):
        values = loop.run_until_complete(values)
    try:
        if isinstance(values, (str, bytes, dict, set, frozenset)):
            raise TypeError
        each = iter(values)
    except TypeError:
        raise Misused(f"returned {type(values).__name__} for {count} completions, expected a list of {count} rewards") from None
    values = list(each)
    if len(values) != count:
        raise Misused(f"returned {len(values)} rewards for {count} completions, expected one each")
    return values


def copies(made):
    """Copies of the environments that completions had, None for one that failed for good; None where there are none."""
    return None if all(own is None for own in made) else [own and copy_of(own) for own in made]


def copy_of(own):
    if "error" in own:
        raise Refused(own["error"])
    file, name = own["file"], own["module"]
    if name not in sys.modules:
        load(file)
    found = getattr(sys.modules.get(name), "__file__", None)
    if found is None or os.path.realpath(found) != os.path.realpath(file):
        raise Refused(f"the environment's module `{name}` is {file}, and here it is {found}; give the files different names")
    return pickle.loads(base64.b64decode(own["pickle"]))


def by_verl(function, request, loop):
    """Rewards of completions one by one; those of a coroutine function all at the same time."""

    async def all_of(awaitables):
        return await asyncio.gather(*awaitables, return_exceptions=True)

    results = []
    for sample in request["samples"]:
        arguments = dict(function.kwargs)
        arguments.update({name: sample[name] for name in VERL})
        try:
            results.append(function.call(arguments))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: it is the function that fails, not this process
            results.append(error)
    waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if waiting:
        done = loop.run_until_complete(all_of([results[i] for i in waiting]))
        for i, result in zip(waiting, done):
            results[i] = result
    return [graded(result, function) for result in results]


def by_batch(function, request, loop):
    """Rewards of a group by verl's signature for batches."""
    samples = request["samples"]
    arguments = {**function.kwargs, **{many: [sample[one] for sample in samples] for many, one in BATCH.items()}}
    return [graded(result, function) for result in one_each(function.call(arguments), samples, loop)]


def graded(result, function):
    """An answer from what `compute_score` returned or raised."""
    if isinstance(result, BaseException):
        return {"error": failed(result, function.function)}
    if not isinstance(result, dict):
        return scored(result, {}, function)
    if "score" not in result:
        return {"error": failed(Misused(f"returned a dict without `score`; its keys are {listed(result)}"), function.function)}
    extra = {str(key): plain(value) for key, value in result.items() if key != "score"}
    return scored(result["score"], extra, function)


def scored(value, extra, function):
    """An answer from the value of a completion."""
    try:
        return {"reward": reward_of(value), "extra": extra}
    except Misused as error:
        return {"error": failed(error, function.function), "infinite": isinstance(error, NotFinite)}


def begin(opening, loop):
    function = Function(**opening)
    judge = {"trl": by_trl, "verl": by_verl, "batch": by_batch}[function.style]

    def handle(request):
        try:
            return {"samples": judge(function, request, loop)}
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            count = len(request["samples"])
            return {"error": failed(error, function.function, f"when called with {count} completions" if count > 1 else "")}

    return {"style": function.style, "needs": function.needs, "columns": function.columns(), "environments": function.environments}, handle


serve(begin)
