//! verl's rollouts of several turns (`actor_rollout_ref.rollout.multi_turn`), its agent loops, and how validation
//! samples.

use crate::common::{bound, top_k};
use crate::key_mapping::prelude::*;
use firebrick_engine::task::ToolParser;

const SECTION: &str = "actor_rollout_ref.rollout.multi_turn";
const CLASSES: &str = "verl's tools and interactions are not read: write the tools as methods of one class, and name it in task.environment \
     (docs/guides/environments.md)";
const LOOP: &str = "an agent loop is a separate program around verl's sampling server: write the code that answers a \
                    turn as a class, and name it in task.environment (docs/guides/environments.md)";
const ONE_TURN: &str = "multi_turn.enable is off";
const GREEDY: &str = "validation is greedy without do_sample, as here by default";

/// Characters of a tool's answer where verl's files say nothing.
const ANSWER: i64 = 256;

pub(super) const TABLE: KeyTable = (
    "actor_rollout_ref.rollout.",
    &[
        ("multi_turn.enable", By(enable)),
        // also as verl of 2024 and 2025 calls it
        ("multi_turn.max_assistant_turns multi_turn.max_turns", If(is_on, ONE_TURN, &By(|a| turns(a, 0)))),
        // a turn of the model follows the last answer
        ("multi_turn.max_user_turns", If(is_on, ONE_TURN, &By(|a| turns(a, 1)))),
        ("multi_turn.max_parallel_calls", If(is_on, ONE_TURN, &By(calls))),
        (
            "multi_turn.max_tool_response_length",
            If(is_on, ONE_TURN, &To(bound, "rollout.multi_turn.max_tool_response_length")),
        ),
        ("multi_turn.tool_response_truncate_side", If(is_on, ONE_TURN, &By(side))),
        ("multi_turn.format", If(is_on, ONE_TURN, &By(format))),
        ("multi_turn.{tool_config,function_tool,interaction_config}_path", Off(CLASSES)),
        (
            "multi_turn.use_inference_chat_template",
            Off("tokens are only ever appended, as the model sampled them; a template that writes earlier turns \
                 differently is rejected"),
        ),
        (
            "multi_turn.tokenization_sanity_check_mode",
            NotNeeded(
                "the template is checked at set-up, and environment/template_mismatch counts rollouts whose tokens it would not write",
            ),
        ),
        ("multi_turn.num_repeat_rollouts", Off("rollout.n sets the number of rollouts per prompt")),
        ("agent.default_agent_loop", By(agent_loop)),
        ("multi_turn.completion_callback agent.agent_loop_config_path agent.agent_loop_manager_class", Off(LOOP)),
        ("agent.num_workers", NotNeeded("task.environment.workers sets the number of environment processes")),
        (
            "agent.custom_async_server.**",
            Off("there is no sampling server: the built-in engine samples from the weights that are trained"),
        ),
        ("val_kwargs.temperature val_kwargs.top_p", If(samples, GREEDY, &Under("rollout.val_kwargs"))),
        ("val_kwargs.top_k", If(samples, GREEDY, &To(top_k, "rollout.val_kwargs.top_k"))),
        ("val_kwargs.do_sample", If(draws, GREEDY, &NotNeeded("set by rollout.val_kwargs.temperature"))),
        ("val_kwargs.n", By(completions)),
        // DeepScaleR validates with a temperature of its own, whatever do_sample says
        ("val_temperature", Same("rollout.val_kwargs.temperature")),
        ("n_val", Same("rollout.val_kwargs.n")),
    ],
);

fn is_on(asked: &SourceKey) -> bool {
    asked.facts.is_on(&format!("{SECTION}.enable"))
}

fn enable(asked: &SourceKey) -> MappedKey {
    let key = "max_tool_response_length";
    match asked.is_on() {
        false => not_needed("one turn a rollout, as here without task.environment"),
        true if asked.facts.is_written(&format!("{SECTION}.{key}")) => cannot(CLASSES),
        true => set(&format!("rollout.multi_turn.{key}"), ANSWER)
            .noted(format!("verl's default; and the turns have to be answered: {CLASSES}")),
    }
}

/// Most turns of the model; `more` of them than the key counts. The least of the keys counts.
fn turns(asked: &SourceKey, more: i64) -> MappedKey {
    let Some(own) = asked.count() else {
        return bound(asked, "");
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
    if asked.whole() == Some(1) {
        return cannot(
            "all calls of a turn are answered, while verl answers only the first; a tool that refuses a second call \
             has the same effect",
        );
    }
    not_needed("all calls of a turn are answered")
}

fn side(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("right") => not_needed("long answers are truncated at their end"),
        Some(side @ ("left" | "middle")) => cannot(format!(
            "long answers are truncated at their end, not {side}; have the tool return what matters first"
        )),
        _ => asked.off_or_wrong("left, middle or right"),
    }
}

fn format(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("gpt-oss") => set("rollout.multi_turn.format", "openai"),
        Some("qwen3_coder") => set("rollout.multi_turn.format", "qwen3_xml"),
        Some(name @ ("hermes" | "llama3_json")) => set("rollout.multi_turn.format", name),
        Some(name) => cannot(format!(
            "tool calls are read as {}, not as {name}; a chat template can ask for one of these",
            ToolParser::names()
        )),
        None => absent(),
    }
}

fn agent_loop(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        None | Some("single_turn_agent") => not_needed("one turn a rollout, as here without task.environment"),
        Some("tool_agent") => not_needed("a class that task.environment names answers tool calls, as this loop does"),
        Some(_) => cannot(LOOP),
    }
}

fn samples(asked: &SourceKey) -> bool {
    asked.facts.is_on("actor_rollout_ref.rollout.val_kwargs.do_sample")
}

/// Whether validation draws, which takes a temperature too (verl's default is 0).
fn draws(asked: &SourceKey) -> bool {
    let temperature = asked.facts.number("actor_rollout_ref.rollout.val_kwargs.temperature");
    samples(asked) && temperature.is_some_and(|t| t > 0.0)
}

fn completions(asked: &SourceKey) -> MappedKey {
    match asked.count() {
        Some(1) => not_needed("one completion of a validation prompt, as here by default"),
        Some(n) if draws(asked) => set("rollout.val_kwargs.n", n),
        Some(_) => not_needed("greedy completions of a prompt are all the same: one has the same mean"),
        None => asked.off_or_wrong("a whole number above 0"),
    }
}
