//! Tool calls in the formats that models write.

mod argument_types;
mod deepseek;
mod harmony;
mod json_calls;
mod qwen_xml;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments by name; numbers beyond 64 bits are [marks](firebrick_spec::json).
    pub arguments: Map<String, Value>,
}

/// The calls of a turn in order; malformed ones as the reason.
pub type ToolCalls = Vec<Result<ToolCall, String>>;

/// Format in which a model writes tool calls, under vLLM's names of their parsers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolParser {
    /// `<tool_call>{"name":…,"arguments":…}</tool_call>` (Qwen and others).
    Hermes,
    /// `{"name":…,"parameters":…}` (Llama 3.1 and later).
    #[serde(rename = "llama3_json")]
    Llama3Json,
    /// `<tool_call><function=…><parameter=…>` (Qwen 3.5).
    #[serde(alias = "qwen3_coder")]
    Qwen3Xml,
    /// Harmony (gpt-oss).
    #[serde(alias = "gpt-oss")]
    Openai,
    /// `<｜tool▁call▁begin｜>…` (DeepSeek).
    #[serde(alias = "deepseek_v31")]
    DeepseekV3,
}

/// A format of tool calls.
struct Format {
    parser: ToolParser,
    /// Its name in configurations.
    name: &'static str,
    /// A call of the tool `tool` with the argument `x`, 1, as a model writes it.
    example: &'static str,
    /// Reads the calls of a turn.
    read: fn(&str) -> ToolCalls,
}

/// All formats.
static FORMATS: [Format; 5] = [
    Format {
        parser: ToolParser::Hermes,
        name: "hermes",
        example: "<tool_call>\n{\"name\": \"tool\", \"arguments\": {\"x\": 1}}\n</tool_call>",
        read: json_calls::hermes,
    },
    Format {
        parser: ToolParser::Llama3Json,
        name: "llama3_json",
        example: "{\"name\": \"tool\", \"parameters\": {\"x\": 1}}",
        read: json_calls::llama3,
    },
    Format {
        parser: ToolParser::Qwen3Xml,
        name: "qwen3_xml",
        example: "<tool_call>\n<function=tool>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        read: qwen_xml::read,
    },
    Format {
        parser: ToolParser::Openai,
        name: "openai",
        example: "<|channel|>commentary to=functions.tool <|constrain|>json<|message|>{\"x\": 1}",
        read: harmony::read,
    },
    Format {
        parser: ToolParser::DeepseekV3,
        name: "deepseek_v3",
        example: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>tool\n```json\n{\"x\": 1}\n```\
                  <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        read: deepseek::read,
    },
];

/// Marks of unsupported formats, and vLLM's names of their parsers.
const UNSUPPORTED: [(&str, &str); 12] = [
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call>call:", "gemma4"),
    ("｜DSML｜", "deepseek_v32"),
    ("functools[", "phi4_mini_json"),
    ("<|action_start|>", "internlm"),
    ("<|tool_call|>", "granite"),
    ("<|python_start|>", "llama4_pythonic"),
];

impl ToolParser {
    fn format(self) -> &'static Format {
        FORMATS.iter().find(|format| format.parser == self).unwrap_or(&FORMATS[0])
    }

    /// The calls in a turn's text. Arguments that are strings get the types that the schemas of `tools`, a list, give
    /// them, as in transformers.
    pub fn parse(self, text: &str, tools: &Value) -> ToolCalls {
        let mut calls = (self.format().read)(text);
        calls.iter_mut().flatten().for_each(|call| argument_types::convert(call, tools));
        calls
    }

    /// A call as a model would write it.
    pub fn example(self) -> &'static str {
        self.format().example
    }

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        self.format().name
    }

    /// The names of all formats.
    pub fn names() -> String {
        FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ")
    }

    /// The format in which a text is exactly one call of this tool with the argument `x`, 1.
    pub fn of_call(text: &str, tool: &str) -> Option<Self> {
        let integer = json!({"properties": {"x": {"type": "integer"}}});
        let tools = json!([{"function": {"name": tool, "parameters": integer}}]);
        let is_call = |calls: ToolCalls| match calls.as_slice() {
            [Ok(call)] => call.name == tool && Value::Object(call.arguments.clone()) == json!({"x": 1}),
            _ => false,
        };
        FORMATS.iter().map(|format| format.parser).find(|parser| is_call(parser.parse(text, &tools)))
    }

    /// vLLM's name of the unsupported format of a call.
    pub fn other(call: &str) -> Option<&'static str> {
        UNSUPPORTED.iter().find(|(mark, _)| call.contains(mark)).map(|(_, name)| *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parser: ToolParser, text: &str) -> Vec<Value> {
        let calls = parser.parse(text, &Value::Null).into_iter();
        calls.map(|call| call.map_or_else(Value::String, |call| json!([call.name, call.arguments]))).collect()
    }

    #[test]
    fn calls_of_hermes_are_read_wherever_they_stand() {
        let of = |text| read(ToolParser::Hermes, text);
        assert_eq!(of("no call, {\"name\": 1}"), Vec::<Value>::new());
        assert_eq!(
            of("Let me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": [2]}}\n</tool_call>"),
            vec![json!(["add", {"a": 1, "b": [2]}])]
        );
        assert_eq!(
            of(
                "<tool_call>{\"name\": \"a\"}</tool_call> and <tool_call>{\"arguments\": \"{\\\"x\\\": 1}\", \"name\": \"b\"}"
            ),
            vec![json!(["a", {}]), json!(["b", {"x": 1}])]
        );
    }

    #[test]
    fn calls_of_llama_are_the_turn() {
        let of = |text| read(ToolParser::Llama3Json, text);
        let one = json!(["add", {"a": 1}]);
        assert_eq!(of(" {\"name\": \"add\", \"parameters\": {\"a\": 1}}"), vec![one.clone()]);
        assert_eq!(
            of("<|python_tag|>{\"name\": \"add\", \"parameters\": {\"a\": 1}}; {\"name\": \"f\", \"arguments\": null}"),
            vec![one, json!(["f", {}])]
        );
        for none in ["The sum {\"name\": \"add\"}", "{\"answer\": 3}", "", "[1, 2]"] {
            assert_eq!(of(none), Vec::<Value>::new(), "{none:?}");
        }
    }

    #[test]
    fn what_is_no_call_says_why() {
        for (parser, text, reason) in [
            (ToolParser::Hermes, "<tool_call>add(1)</tool_call>", "is not JSON"),
            (ToolParser::Hermes, "<tool_call>[1]</tool_call>", "is [1]"),
            (ToolParser::Hermes, "<tool_call>{}</tool_call>", "no `name`"),
            (
                ToolParser::Hermes,
                "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
                "arguments of `f` are 3",
            ),
            (ToolParser::Llama3Json, "{\"name\": \"add\"", "is not JSON"),
            (ToolParser::Llama3Json, "<|python_tag|>print(1)", "is not JSON"),
            (ToolParser::Qwen3Xml, "<tool_call>add(1)</tool_call>", "no `<function=NAME>`"),
            (
                ToolParser::Qwen3Xml,
                "<tool_call><function=add>\n<parameter=a>1",
                "the parameter `a` of the tool call of `add`",
            ),
            (ToolParser::Openai, "<|channel|>commentary to=functions.f code<|message|>1 + 1", "is not JSON"),
            (ToolParser::DeepseekV3, "<｜tool▁call▁begin｜>add(1)<｜tool▁call▁end｜>", "no `<｜tool▁sep｜>`"),
            (
                ToolParser::DeepseekV3,
                "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",
                "arguments of `f` are [1]",
            ),
        ] {
            let calls = parser.parse(text, &Value::Null);
            assert_eq!(calls.len(), 1, "{text}");
            let error = calls[0].as_ref().expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn calls_of_qwen_are_tags_of_functions_and_parameters() {
        let of = |text| read(ToolParser::Qwen3Xml, text);
        let one = "<tool_call>\n<function=add>\n<parameter=a>\n 1\n</parameter>\n<parameter=s>\nx\n\ny</b>\n</parameter>\n\
                   </function>\n</tool_call>";
        let read_one = json!(["add", {"a": " 1", "s": "x\n\ny</b>"}]);
        assert_eq!(of(one), vec![read_one.clone()]);
        let two = format!("Both.\n\n{one}\n<tool_call>\n<function=now>\n</function>\n</tool_call>");
        assert_eq!(of(&two), vec![read_one, json!(["now", {}])]);
        assert_eq!(of("<function=now></function>"), Vec::<Value>::new());
    }

    #[test]
    fn calls_of_harmony_are_messages_to_a_function() {
        let of = |text| read(ToolParser::Openai, text);
        let one = json!(["add", {"a": 1}]);
        let sampled = "<|channel|>analysis<|message|>to=functions.f?<|end|><|start|>assistant<|channel|>commentary \
                       to=functions.add <|constrain|>json<|message|>{\"a\": 1}";
        assert_eq!(of(sampled), vec![one.clone()]);
        // as chat templates write it, with the token that ends it
        assert_eq!(of(" to=functions.add<|channel|>commentary json<|message|>{\"a\": 1}<|call|>"), vec![one]);
        assert_eq!(of("<|channel|>commentary to=functions.now<|message|>"), vec![json!(["now", {}])]);
        assert_eq!(of("<|channel|>final<|message|>to=functions.add"), Vec::<Value>::new());
        assert_eq!(of("to=functions.add"), Vec::<Value>::new());
    }

    #[test]
    fn calls_of_deepseek_have_a_block_of_json_or_the_json_itself() {
        let of = |text| read(ToolParser::DeepseekV3, text);
        let (add, now) = (json!(["add", {"a": 1}]), json!(["now", {}]));
        let v3 = "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": 1}\n```\
                  <｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\
                  <｜tool▁calls▁end｜>";
        assert_eq!(of(v3), vec![add.clone(), now.clone()]);
        let v31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\
                   <｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
        assert_eq!(of(v31), vec![add, now]);
    }

    #[test]
    fn an_integer_of_any_length_is_an_argument_as_it_is_written() {
        let json = "{\"x\": 98765432109876543210}";
        let schema = json!({"properties": {"x": {"type": "integer"}}});
        let tools = json!([{"type": "function", "function": {"name": "tool", "parameters": schema}}]);
        for own in &FORMATS {
            let text = own.example.replace("{\"x\": 1}", json).replace("\n1\n", "\n98765432109876543210\n");
            let calls = own.parser.parse(&text, &tools);
            let call = calls[0].as_ref().expect(own.name);
            assert_eq!(firebrick_spec::json::to_text(&json!(call.arguments)), json.replace(' ', ""), "{}", own.name);
        }
    }

    #[test]
    fn every_format_reads_its_example_and_no_other() {
        for own in &FORMATS {
            assert_eq!(ToolParser::of_call(own.example, "tool"), Some(own.parser), "{}", own.name);
            assert_eq!(own.parser.name(), own.name);
            // the name is that of the configuration
            assert_eq!(json!(own.parser), own.name);
        }
        assert_eq!(ToolParser::of_call("tool(x=1)", "tool"), None);
        assert_eq!(ToolParser::other("[TOOL_CALLS] [{}]"), Some("mistral"));
    }
}
