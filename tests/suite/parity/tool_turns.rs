//! Rollouts with tools by the chat templates of some model families: tokens, calls and answers against TRL's
//! (`chat_templates/tool_turns.json`).

use super::training_turns::{family_tokenizer, jinja, undated};
use crate::support::{checked, fixtures, is_foreign, parse, read};
use firebrick_engine::data::Prompt;
use firebrick_engine::task::{
    Environment, EnvironmentError, Environments, Example, Observation, PromptText, TOOLS, ToolParser, ToolRole, Turn,
};
use firebrick_engine::turns::{Episodes, Limits, Outcome, TurnTemplate, tool_format};
use firebrick_models::Tokenizer;
use firebrick_models::random::DrawKey;
use firebrick_models::tokenizer::{EndTokens, Message};
use firebrick_sampler::{FinishReason, Next, Sample, Turns};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::{Arc, Mutex};

#[derive(Deserialize)]
struct Case {
    template: String,
    names: Map<String, Value>,
    special: Vec<String>,
    tools: Value,
    /// The prompt, then turns of the model, and what is between them.
    parts: Vec<Part>,
}

#[derive(Clone, Deserialize)]
struct Part {
    text: String,
    ids: Vec<u32>,
    /// What a turn calls.
    #[serde(default)]
    calls: Vec<Value>,
    /// What tools answer before the next turn.
    answers: Option<Vec<String>>,
}

fn cases() -> Vec<Case> {
    let path = fixtures().join("chat_templates/tool_turns.json");
    if is_foreign() && !path.is_file() { Vec::new() } else { read(&path) }
}

/// Tools with answers that are known before.
struct Script {
    tools: Value,
    answers: Vec<String>,
    /// What was called.
    calls: Arc<Mutex<Vec<Value>>>,
}

struct Player {
    answers: std::vec::IntoIter<String>,
    calls: Arc<Mutex<Vec<Value>>>,
}

impl Environments for Script {
    fn tools(&self) -> &Value {
        &self.tools
    }

    fn make(&self, _: usize) -> Box<dyn Environment> {
        Box::new(Player { answers: self.answers.clone().into_iter(), calls: Arc::clone(&self.calls) })
    }
}

impl Environment for Player {
    fn reset(&mut self, _: &Example) -> Result<Option<String>, EnvironmentError> {
        Ok(None)
    }

    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError> {
        Ok(Observation::of_calls(turn, |call| {
            self.calls.lock().expect("calls").push(json!(call));
            self.answers.next().ok_or_else(|| "no answer".to_owned())
        }))
    }
}

/// A conversation of a user and a model that calls tools.
struct Rollout {
    tokenizer: Arc<Tokenizer>,
    ends: EndTokens,
    template: TurnTemplate,
    tools: Value,
    prompt: Prompt,
}

impl Rollout {
    fn of(tokenizer: Tokenizer, checkpoint: &[u32], tools: &Value, role: ToolRole) -> Result<Self, String> {
        let tokenizer = Arc::new(tokenizer.for_turns());
        let ends = EndTokens::new(checkpoint, &tokenizer);
        let messages: Vec<Message> = parse("a prompt", &json!([{"role": "user", "content": "do it"}]));
        let format = tool_format(&tokenizer, tools, &messages, None).map_err(|error| error.to_string())?;
        let template = TurnTemplate::new(&tokenizer, &ends.ids, tools, &messages, format, role);
        let template = template.map_err(|error| error.to_string())?;
        let mut example = Example { prompt: PromptText::Chat(messages.clone()), ..Example::text("", "") };
        example.fields.insert(TOOLS, tools.clone());
        let (text, tokens) = tokenizer.encode_chat(&messages, example.chat_options()).expect("a prompt");
        let prompt = Prompt { example, text, tokens, row: None };
        Ok(Self { tokenizer, ends, template, tools: tools.clone(), prompt })
    }

    /// Plays turns of the model with the answers of tools: what is between the turns, what was called, and what came
    /// of it.
    fn played(&self, turns: &[Vec<u32>], answers: Vec<String>) -> (Vec<Vec<u32>>, Vec<Value>, Outcome) {
        let calls = Arc::default();
        let script = Script { tools: self.tools.clone(), answers, calls: Arc::clone(&calls) };
        let limits = Limits {
            max_assistant_turns: None,
            max_tool_response_length: None,
            stop_ids: self.ends.ids.clone(),
            stop: Vec::new(),
            prompt_length: 10_000,
        };
        let key = DrawKey { seed: 1, step: 1, prompt_index: 0, sample: 0 };
        let prompts = std::slice::from_ref(&self.prompt);
        let episodes = Episodes::begin(&script, &self.template, limits, prompts, 1, key, &self.tokenizer);
        let mut episodes = episodes.expect("begun");
        let mut sample = Sample {
            request: 0,
            sample: 0,
            tokens: Vec::new(),
            inserted: Vec::new(),
            logps: Vec::new(),
            full_logps: Vec::new(),
            finish: FinishReason::Stop,
            routes: None,
        };
        let mut between = Vec::new();
        for turn in turns {
            sample.tokens.extend(turn);
            match episodes.turn(&sample, 10_000) {
                Next::Append(tokens) => {
                    let start = sample.tokens.len();
                    sample.tokens.extend(&tokens);
                    sample.inserted.push(start..sample.tokens.len());
                    between.push(tokens);
                }
                Next::End => break,
                other => panic!("{other:?}: {:?}", episodes.outcome(0, 0).lost),
            }
        }
        let outcome = episodes.outcome(0, 0).clone();
        let calls = calls.lock().expect("calls").clone();
        (between, calls, outcome)
    }
}

impl Case {
    fn tokenizer(&self) -> Tokenizer {
        family_tokenizer(&jinja(&self.template), &self.names, &self.special)
    }

    fn turns(&self) -> impl Iterator<Item = &Part> {
        self.parts[1..].iter().filter(|part| part.answers.is_none())
    }

    fn answers(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(|part| part.answers.is_some())
    }

    /// The checkpoint's one end is the tokenizer's.
    fn rollout(&self) -> Rollout {
        let tokenizer = self.tokenizer();
        let eos = tokenizer.eos_id().expect("an end");
        let rollout = Rollout::of(tokenizer, &[eos], &self.tools, ToolRole::Tool);
        rollout.unwrap_or_else(|error| panic!("{}: {error}", self.template))
    }
}

#[test]
fn rollouts_with_tools_have_the_tokens_and_the_calls_of_trl() {
    let mut turns = 0;
    for case in cases() {
        let rollout = case.rollout();
        assert_eq!(undated(&rollout.prompt.text), case.parts[0].text, "{}", case.template);
        let answers = case.answers().filter_map(|part| part.answers.clone()).flatten().collect();
        let sampled: Vec<Vec<u32>> = case.turns().map(|part| part.ids.clone()).collect();
        let (between, calls, outcome) = rollout.played(&sampled, answers);
        let expected: Vec<&Part> = case.answers().collect();
        let text = |ids: &[u32]| rollout.tokenizer.decode(ids, false).expect("text");
        assert_eq!(between.len(), expected.len(), "{}", case.template);
        for (found, expected) in between.iter().zip(&expected) {
            assert_eq!(text(found), expected.text, "{}", case.template);
            assert_eq!(found, &expected.ids, "{}", case.template);
        }
        let called: Vec<Value> = case.turns().flat_map(|part| part.calls.clone()).collect();
        assert_eq!(calls, called, "{}", case.template);
        assert_eq!((outcome.tool_calls, outcome.failed_calls), (called.len(), 0), "{}", case.template);
        assert!(!outcome.differs_from_template && outcome.lost.is_none(), "{}: {outcome:?}", case.template);
        let names: Vec<&Value> = outcome.turns.iter().filter_map(|message| message.fields().get("name")).collect();
        assert!(names.len() == called.len() && names.iter().all(|name| **name == "add"), "{}", case.template);
        turns += sampled.len();
    }
    if !is_foreign() || turns > 0 {
        checked("turns with tools", turns);
    }
}

#[test]
fn calls_are_read_in_the_format_of_the_chat_template() {
    let formats = [
        ("qwen2_5", ToolParser::Hermes),
        ("qwen3", ToolParser::Hermes),
        ("qwen3_5_think", ToolParser::Qwen3Xml),
        ("qwen3_5_nothink", ToolParser::Qwen3Xml),
        ("gptoss", ToolParser::Openai),
        ("deepseekv3", ToolParser::DeepseekV3),
    ];
    for case in cases() {
        let (_, format) = formats.iter().find(|(name, _)| *name == case.template).expect("a format");
        let messages: Vec<Message> = parse("a prompt", &json!([{"role": "user", "content": "do it"}]));
        for tokenizer in [case.tokenizer(), case.tokenizer().for_turns()] {
            let found = tool_format(&tokenizer, &case.tools, &messages, None).expect("a format");
            assert_eq!(found, *format, "{}", case.template);
            let wanted = tool_format(&tokenizer, &case.tools, &messages, Some(ToolParser::Llama3Json));
            assert_eq!(wanted.expect("a format"), ToolParser::Llama3Json);
        }
    }
}

#[test]
fn gpt_oss_s_calls_end_turns_and_are_kept_in_the_order_in_which_it_writes_them() {
    let Some(case) = cases().into_iter().find(|case| case.template == "gptoss") else { return };
    assert_eq!(case.tokenizer().training_family(), None);
    assert_eq!(case.tokenizer().turns_family(), Some("gpt-oss"));
    let rollout = case.rollout();
    let id = |token: &str| rollout.tokenizer.token_id(token).expect(token);
    let (call, back) = (id("<|call|>"), id("<|return|>"));
    assert_eq!(
        (rollout.ends.ids.as_slice(), rollout.ends.added.as_slice()),
        ([back, call].as_slice(), [call].as_slice())
    );
    // templates write the recipient before the channel, the model behind it
    let own = |part: &Part| {
        let text = part.text.replace(
            " to=functions.add<|channel|>commentary json",
            "<|channel|>commentary to=functions.add <|constrain|>json",
        );
        rollout.tokenizer.encode(&text, false).expect("tokens")
    };
    let answers: Vec<String> = case.answers().filter_map(|part| part.answers.clone()).flatten().collect();
    let (between, calls, outcome) = rollout.played(&case.turns().map(own).collect::<Vec<_>>(), answers);
    assert_eq!(between, case.answers().map(|part| part.ids.clone()).collect::<Vec<_>>());
    assert_eq!(calls, case.turns().flat_map(|part| part.calls.clone()).collect::<Vec<_>>());
    assert!(!outcome.differs_from_template, "{outcome:?}");
}

#[test]
fn a_call_in_a_thought_is_none() {
    for case in cases().iter().filter(|case| case.template.starts_with("qwen3")) {
        let rollout = case.rollout();
        let call = &case.turns().next().expect("a turn").text;
        let (_, words) = call.rsplit_once("</think>\n\n").unwrap_or(("", call));
        let words = words.trim_end_matches("<|im_end|>");
        let opened = rollout.prompt.text.trim_end().ends_with("<think>");
        let think = if opened { "" } else { "<think>\n" };
        for (turn, calls) in [
            (format!("{think}{words}\n</think>\n\nno<|im_end|>"), 0),
            (format!("{think}{words}<|im_end|>"), 0),
            (format!("{think}{words}\n</think>\n\n{words}<|im_end|>"), 2),
        ] {
            let turn = rollout.tokenizer.encode(&turn, false).expect("tokens");
            let (_, found, _) = rollout.played(&[turn], vec!["1".to_owned(); 2]);
            assert_eq!(found.len(), calls, "{}: {found:?}", case.template);
        }
    }
}

fn family(template: &str, special: &[&str]) -> Tokenizer {
    let names = json!({"eos_token": special[0]}).as_object().cloned().expect("names");
    let special: Vec<String> = special.iter().map(|own| (*own).to_owned()).collect();
    family_tokenizer(template, &names, &special)
}

#[test]
fn templates_without_messages_of_tools_say_so_and_take_them_from_the_user() {
    let tools = json!([{"type": "function", "function": {"name": "add", "description": "Adds."}}]);
    let phi = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"];
    let gemma = ["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"];
    for (name, special, refusal, between) in [
        ("phi3", &phi[..], "it omits tool answers", "\n<|user|>\n1\n22<|end|>\n<|assistant|>\n"),
        (
            "gemma3",
            &gemma[..],
            "it refuses messages of the role `tool`",
            "\n<start_of_turn>user\n1\n22<end_of_turn>\n<start_of_turn>model\n",
        ),
    ] {
        let tokenizer = || family(&jinja(name), special);
        let refused = Rollout::of(tokenizer(), &[], &tools, ToolRole::Tool).err().expect(name);
        for part in [refusal, "rollout.multi_turn.tool_role: user"] {
            assert!(refused.contains(part), "{refused}");
        }
        let rollout = Rollout::of(tokenizer(), &[], &tools, ToolRole::User).unwrap_or_else(|error| panic!("{error}"));
        assert!(!rollout.template.reads_tools(&[Message::new("user", "1")]));
        let end = if name == "phi3" { "<|end|>" } else { "<end_of_turn>" };
        let call = ToolParser::Hermes.example().replace("\"tool\"", "\"add\"");
        let turns = [format!("{call}\n{call}{end}"), format!("so{end}")];
        let turns = turns.map(|text| rollout.tokenizer.encode(&text, false).expect("tokens"));
        let (found, calls, outcome) = rollout.played(&turns, vec!["1".to_owned(), "22".to_owned()]);
        assert_eq!(found.len(), 1);
        assert_eq!(rollout.tokenizer.decode(&found[0], false).expect("text"), between);
        assert_eq!((calls.len(), outcome.differs_from_template), (2, false), "{name}: {outcome:?}");
        let roles: Vec<&str> = outcome.turns.iter().map(Message::role).collect();
        assert_eq!(roles, ["assistant", "tool", "tool", "assistant"]);
    }
}

/// What DeepSeek V3.1's template does with turns, in few words.
const DEEPSEEK: &str = "{%- set ns = namespace(user=false, tool=false) -%}{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{%- set ns.user = true -%}{{ '<｜User｜>' + message['content'] }}{%- endif -%}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined -%}
{%- if ns.user -%}{{ '<｜Assistant｜></think>' }}{%- endif -%}{%- set ns.user = false -%}
{%- for tool in message['tool_calls'] -%}
{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}
{%- endfor -%}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' -%}
{%- if ns.user -%}{{ '<｜Assistant｜>' }}
{%- if message['prefix'] is defined and message['prefix'] and thinking -%}{{ '<think>' }}{%- else -%}{{ '</think>' }}{%- endif -%}
{%- endif -%}{%- set ns.user = false -%}
{%- if ns.tool -%}{{ message['content'] + '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false -%}
{%- else -%}{%- set content = message['content'] -%}
{%- if '</think>' in content -%}{%- set content = content.split('</think>', 1)[1] -%}{%- endif -%}
{{ content + '<｜end▁of▁sentence｜>' }}{%- endif -%}
{%- endif -%}
{%- if message['role'] == 'tool' -%}{%- set ns.user = false -%}{%- set ns.tool = true -%}
{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.user -%}{{ '<｜Assistant｜>' }}
{%- if thinking -%}{{ '<think>' }}{%- else -%}{{ '</think>' }}{%- endif -%}{%- endif -%}";

#[test]
fn turns_of_deepseek_v3_1_are_those_that_were_sampled_with_and_without_thought() {
    let Some(case) = cases().into_iter().find(|case| case.template == "deepseekv3") else { return };
    let call =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    for (thinking, first) in [(false, call.to_owned()), (true, format!("hm</think>{call}"))] {
        let tokenizer = family_tokenizer(DEEPSEEK, &case.names, &case.special);
        assert_eq!(tokenizer.training_family(), Some("DeepSeek V3.1"));
        let kwargs = json!({"thinking": thinking}).as_object().cloned().expect("variables");
        let tokenizer = tokenizer.with_chat_template_kwargs(&kwargs).expect("variables");
        let rollout =
            Rollout::of(tokenizer, &[], &case.tools, ToolRole::Tool).unwrap_or_else(|error| panic!("{error}"));
        let turns = [first, "it is 4711".to_owned()].map(|text| {
            let text = text + "<｜end▁of▁sentence｜>";
            rollout.tokenizer.encode(&text, false).expect("tokens")
        });
        let (between, calls, outcome) = rollout.played(&turns, vec!["4711".to_owned()]);
        let between: Vec<String> =
            between.iter().map(|ids| rollout.tokenizer.decode(ids, false).expect("text")).collect();
        assert_eq!(between, ["<｜tool▁output▁begin｜>4711<｜tool▁output▁end｜>"]);
        assert_eq!(calls, [json!({"name": "add", "arguments": {"a": 2}})]);
        assert!(!outcome.differs_from_template, "{outcome:?}");
    }
}

#[test]
fn a_format_that_is_not_read_is_refused_by_its_name() {
    let template = "{%- for m in messages -%}{{ m.role + ': ' + (m.content or '') }}
        {%- if m.tool_calls -%}{{ '[TOOL_CALLS]' + m.tool_calls[0].function.name + '[ARGS]' + (m.tool_calls[0].function.arguments | tojson) }}
        {%- endif -%}{{ eos_token if m.role == 'assistant' else '\\n' }}{%- endfor -%}
        {%- if add_generation_prompt -%}assistant: {% endif -%}";
    let tools = json!([{"type": "function", "function": {"name": "add"}}]);
    let found = Rollout::of(family(template, &["</s>"]), &[], &tools, ToolRole::Tool).err().expect("refused");
    for part in [
        "\"[TOOL_CALLS]name_of_a_tool[ARGS]{\\\"x\\\": 1}\"",
        "vLLM's `mistral`",
        "hermes, llama3_json, qwen3_xml, openai, deepseek_v3",
    ] {
        assert!(found.contains(part), "{found}");
    }
}
