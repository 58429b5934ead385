//! verl's rollouts of several turns (`actor_rollout_ref.rollout.multi_turn`), its agent loops, and how validation
//! samples.

use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use firebrick_engine::task::ToolParser;

const SECTION: &str = "actor_rollout_ref.rollout.multi_turn";
const CLASSES: &str = "verl's tools and interactions are not read: write the tools as methods of one class, and name it in task.environment \
     (docs/guides/environments.md)";
const LOOP: &str = "an agent loop is a separate program around verl's sampling server: write the code that answers a \
                    turn as a class, and name it in task.environment (docs/guides/environments.md)";
const OFF: &str = "multi_turn.enable is off";
const SERVER: &str = "there is no sampling server: the built-in engine samples from the weights that are trained";

/// Characters of a tool's answer where verl's files say nothing.
const ANSWER: i64 = 256;

pub(super) const TABLE: &[KeyRule] = &[
    ("actor_rollout_ref.rollout.multi_turn.enable", By(enable)),
    ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", By(|a| turns(a, 0))),
    // a turn of the model follows the last answer
    ("actor_rollout_ref.rollout.multi_turn.max_user_turns", By(|a| turns(a, 1))),
    ("actor_rollout_ref.rollout.multi_turn.max_parallel_calls", By(calls)),
    ("actor_rollout_ref.rollout.multi_turn.max_tool_response_length", By(answer_length)),
    ("actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side", By(side)),
    ("actor_rollout_ref.rollout.multi_turn.format", By(format)),
    ("actor_rollout_ref.rollout.multi_turn.tool_config_path", Off(CLASSES)),
    ("actor_rollout_ref.rollout.multi_turn.function_tool_path", Off(CLASSES)),
    ("actor_rollout_ref.rollout.multi_turn.interaction_config_path", Off(CLASSES)),
    (
        "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template",
        Off("tokens are only ever appended, as the model sampled them; a template that writes earlier turns \
             differently is rejected"),
    ),
    (
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
        NotNeeded(
            "the template is checked at set-up, and environment/template_mismatch counts rollouts whose tokens it would not write",
        ),
    ),
    (
        "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts",
        Off("rollout.n sets the number of rollouts per prompt"),
    ),
    // verl of 2024 and 2025
    ("actor_rollout_ref.rollout.multi_turn.max_turns", By(|a| turns(a, 0))),
    ("actor_rollout_ref.rollout.multi_turn.completion_callback", Off(LOOP)),
    ("actor_rollout_ref.rollout.agent.default_agent_loop", By(agent_loop)),
    ("actor_rollout_ref.rollout.agent.agent_loop_config_path", Off(LOOP)),
    ("actor_rollout_ref.rollout.agent.agent_loop_manager_class", Off(LOOP)),
    (
        "actor_rollout_ref.rollout.agent.num_workers",
        NotNeeded("task.environment.workers sets the number of environment processes"),
    ),
    ("actor_rollout_ref.rollout.agent.custom_async_server.**", Off(SERVER)),
    ("actor_rollout_ref.rollout.val_kwargs.temperature", By(|a| sampled(a, "rollout.val_kwargs.temperature"))),
    ("actor_rollout_ref.rollout.val_kwargs.top_p", By(|a| sampled(a, "rollout.val_kwargs.top_p"))),
    ("actor_rollout_ref.rollout.val_kwargs.top_k", By(top_k)),
    ("actor_rollout_ref.rollout.val_kwargs.do_sample", By(do_sample)),
    ("actor_rollout_ref.rollout.val_kwargs.n", By(completions)),
    // DeepScaleR validates with a temperature of its own, whatever do_sample says
    ("actor_rollout_ref.rollout.val_temperature", Same("rollout.val_kwargs.temperature")),
    ("actor_rollout_ref.rollout.n_val", Same("rollout.val_kwargs.n")),
];

fn is_on(asked: &SourceKey) -> bool {
    asked.facts.is_on(&format!("{SECTION}.enable"))
}

fn enable(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("one turn a rollout, as here without task.environment");
    }
    let written = asked.facts.is_written(&format!("{SECTION}.max_tool_response_length"));
    let note = format!("verl's default; and the turns have to be answered: {CLASSES}");
    if written {
        return cannot(CLASSES);
    }
    set_noted("rollout.multi_turn.max_tool_response_length", ANSWER, note)
}

/// Most turns of the model; `more` of them than the key counts. The least of the keys counts.
fn turns(asked: &SourceKey, more: i64) -> MappedKey {
    if !is_on(asked) {
        return not_needed(OFF);
    }
    let Some(own) = asked.whole().filter(|n| *n > 0) else {
        return if asked.is_off() {
            not_needed("no limit, as here by default")
        } else {
            asked.wrong("a whole number above 0")
        };
    };
    let most = |name: &str, more: i64| {
        let value = asked.facts.whole(&format!("{SECTION}.{name}"));
        value.filter(|n| *n > 0).map(|n| n + more)
    };
    let other =
        if more == 0 { most("max_user_turns", 1) } else { most("max_assistant_turns", 0).or(most("max_turns", 0)) };
    match other {
        Some(other) if other < own + more => not_needed(format!("the other limit comes first: {other} turns")),
        _ => set("rollout.multi_turn.max_assistant_turns", own + more),
    }
}

fn calls(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        _ if !is_on(asked) => not_needed(OFF),
        Some(1) => cannot(
            "all calls of a turn are answered, while verl answers only the first; a tool that refuses a second call \
             has the same effect",
        ),
        _ => not_needed("all calls of a turn are answered"),
    }
}

fn answer_length(asked: &SourceKey) -> MappedKey {
    match asked.whole().filter(|n| *n > 0) {
        _ if !is_on(asked) => not_needed(OFF),
        Some(most) => set("rollout.multi_turn.max_tool_response_length", most),
        None if asked.is_off() => not_needed("no limit, as here by default"),
        None => asked.wrong("a whole number above 0"),
    }
}

fn side(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        _ if !is_on(asked) => not_needed(OFF),
        Some("right") => not_needed("long answers are truncated at their end"),
        Some(side @ ("left" | "middle")) => cannot(format!(
            "long answers are truncated at their end, not {side}; have the tool return what matters first"
        )),
        _ if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("left, middle or right"),
    }
}

fn format(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        _ if !is_on(asked) => not_needed(OFF),
        Some("gpt-oss") => set("rollout.multi_turn.format", "openai"),
        Some("qwen3_coder") => set("rollout.multi_turn.format", "qwen3_xml"),
        Some(name @ ("hermes" | "llama3_json")) => set("rollout.multi_turn.format", name),
        Some(name) => cannot(format!(
            "tool calls are read as {}, not as {name}; a chat template can ask for one of these",
            ToolParser::names()
        )),
        None => not_needed("has no value in the files"),
    }
}

fn agent_loop(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        None | Some("single_turn_agent") => not_needed("one turn a rollout, as here without task.environment"),
        Some("tool_agent") => not_needed("a class that task.environment names answers tool calls, as this loop does"),
        Some(_) => cannot(LOOP),
    }
}

fn is_sampled(asked: &SourceKey) -> bool {
    asked.facts.is_on("actor_rollout_ref.rollout.val_kwargs.do_sample")
}

const GREEDY: &str = "validation is greedy without do_sample, as here by default";

fn sampled(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.number() {
        _ if !is_sampled(asked) => not_needed(GREEDY),
        Some(_) => set(key, plain(asked.value)),
        None if asked.is_absent() => not_needed("has no value in the files"),
        None => asked.wrong("a number"),
    }
}

fn top_k(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        _ if !is_sampled(asked) => not_needed(GREEDY),
        Some(k) if k <= 0 => set("rollout.val_kwargs.top_k", -1),
        Some(k) => set("rollout.val_kwargs.top_k", k),
        None if asked.is_absent() => not_needed("has no value in the files"),
        None => asked.wrong("a whole number"),
    }
}

/// Whether validation draws, which takes a temperature too (verl's default is 0).
fn draws(asked: &SourceKey) -> bool {
    let temperature = asked.facts.number("actor_rollout_ref.rollout.val_kwargs.temperature");
    is_sampled(asked) && temperature.is_some_and(|t| t > 0.0)
}

fn do_sample(asked: &SourceKey) -> MappedKey {
    not_needed(if draws(asked) { "set by rollout.val_kwargs.temperature" } else { GREEDY })
}

fn completions(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 1 && draws(asked) => set("rollout.val_kwargs.n", n),
        Some(n) if n > 1 => not_needed("greedy completions of a prompt are all the same: one has the same mean"),
        Some(1) => not_needed("one completion of a validation prompt, as here by default"),
        None if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("a whole number above 0"),
    }
}
