//! Templates that write a conversation differently once it continues are refused, with what they write.

use super::WORDS;
use firebrick_engine::Result;
use firebrick_engine::task::{ToolParser, ToolRole};
use firebrick_engine::turns::TurnTemplate;
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::Message;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// Qwen 2.5's way of writing tools, turns and answers, in few words.
const QWEN: &str = "{%- if tools %}{{ '<user>' + (tools[0] | tojson) }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<user>' }}{%- endif -%}
{{ '<tool>' + m.content + '</tool>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<eos>\\n' }}{%- endif -%}
{%- else -%}{{ '<' + m.role + '>' + m.content + '<eos>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}";

fn message(role: &str, content: &str) -> Message {
    Message::new(role, content)
}

fn tokenizer(template: &str) -> Arc<Tokenizer> {
    let alphabet = " !\"'().,:/<>_{}[]\n0123456789abcdefghijklmnopqrstuvwxyzIO";
    let own = Tokenizer::characters_and_words(alphabet, &WORDS).expect("a tokenizer");
    Arc::new(own.with_chat_template(template, Path::new("test")).expect("a template"))
}

fn opened(template: &str, stop: &[u32]) -> Result<TurnTemplate> {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let prompt = [message("user", "ab")];
    TurnTemplate::new(&tokenizer(template), stop, &tools, &prompt, ToolParser::Hermes, ToolRole::Tool)
}

fn refused(template: &str, stop: &[u32]) -> String {
    opened(template, stop).map(|_| ()).expect_err(template).to_string()
}

#[test]
fn what_stands_between_turns_is_what_the_template_writes_there() {
    let template = opened(QWEN, &[1]).expect("a template that can be used");
    let tokenizer = tokenizer(QWEN);
    let told = [message("user", "ab"), message("assistant", "a!")];
    let text = |ended, messages: &[Message]| {
        let tokens = template.between(ended, &told, messages).expect("tokens");
        tokenizer.decode(&tokens, false).expect("text")
    };
    let two = [message("tool", "1"), message("tool", "22")];
    let written = "\n<user><tool>1</tool><tool>22</tool><eos>\n<assistant>";
    assert_eq!(text(Some(1), &two), written);
    // a turn that a stop string has ended is ended here
    assert_eq!(text(None, &two[..1]), "<eos>\n<user><tool>1</tool><eos>\n<assistant>");
    let whole = [&told, &two[..], &[message("assistant", "b")]].concat();
    let text = template.render(&whole, false).expect("rendered");
    let cut = text.strip_suffix('\n').expect("a line");
    for (text, is) in [(cut, true), (&cut[..cut.len() - 5], true), (&cut[1..], false)] {
        let tokens = tokenizer.encode(text, false).expect("tokens");
        assert_eq!(template.writes(&tokens, &whole).expect("compared"), is, "{text:?}");
    }
}

#[test]
fn a_template_that_forgets_the_reasoning_of_earlier_turns_is_refused() {
    let forgets = QWEN.replace(
        "'>' + m.content + '<eos>",
        "'>' + (m.content if loop.last or m.role == 'user' else m.content.split('</tool_call>')[-1]) + '<eos>",
    );
    let found = refused(&forgets, &[1]);
    assert!(found.contains("not prefix-preserving: once a tool has answered"), "{found}");
    assert!(found.contains("model.chat_template"), "{found}");
}

#[test]
fn a_template_that_writes_the_last_turn_otherwise_is_refused() {
    let thinks = QWEN.replace(
        "{%- else -%}{{",
        "{%- elif m.role == 'assistant' and loop.last -%}{{ '<assistant>' + 'o' + m.content + '<eos>\\n' }}{%- else -%}{{",
    );
    let found = refused(&thinks, &[1]);
    assert!(found.contains("differently from the generation prompt"), "{found}");
    // only where a second turn follows the first answer
    let later = QWEN
        .replace("'<' + m.role + '>' + m.content", "'<' + m.role + '>' + ('o' if loop.index > 3 else '') + m.content");
    let found = refused(&later, &[1]);
    assert!(found.contains("once another turn follows"), "{found}");
}

#[test]
fn a_template_that_ends_turns_otherwise_than_sampling_is_refused() {
    let found = refused(QWEN, &[0]);
    assert!(found.contains("sampling ends with [\"<pad>\"]"), "{found}");
    let endless = QWEN.replace("+ m.content + '<eos>\\n' }}{%- endif -%}", "+ m.content }}{%- endif -%}");
    let found = refused(&endless, &[1]);
    assert!(found.contains("it ends a turn of the assistant with \"\""), "{found}");
}

#[test]
fn a_template_that_leaves_tools_out_is_refused() {
    let silent = QWEN.replace("'<tool>' + m.content + '</tool>'", "''");
    let found = refused(&silent, &[1]);
    assert!(found.contains("it omits tool answers"), "{found}");
}

#[test]
fn a_template_without_tools_says_so_itself() {
    let raises = QWEN
        .replace("{%- if m.role == 'tool' -%}", "{%- if m.role == 'tool' -%}{{ raise_exception('no tools here') }}");
    let found = refused(&raises, &[1]);
    assert!(found.contains("no tools here"), "{found}");
}

#[test]
fn what_a_tool_answers_spells_no_special_token() {
    let template = opened(QWEN, &[1]).expect("a template that can be used");
    let tokens = template
        .between(Some(1), &[message("user", "1"), message("assistant", "2")], &[message("tool", "1<eos>2<pad>")])
        .expect("tokens");
    let text = tokenizer(QWEN).decode(&tokens, false).expect("text");
    assert_eq!(text, "\n<user><tool>1<eos>2<pad></tool><eos>\n<assistant>");
    assert_eq!(tokens.iter().filter(|&&id| id < 2).collect::<Vec<_>>(), [&1]);
}
