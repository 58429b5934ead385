//! Chat templates for training, of model families whose template writes a turn otherwise once others follow.
//!
//! They drop the reasoning of earlier turns, or write an empty one before the last turn only. Trained on them, earlier
//! turns would be learnt without reasoning; sampled from, a rollout of several turns would not be what the template
//! writes. A family is recognized by conditions of its template, which are replaced: all else stays as it is.

/// A family: its name, and what is replaced in its template.
pub(super) struct Variant {
    pub family: &'static str,
    edits: &'static [(&'static str, &'static str)],
    /// Further parts of its template.
    has: &'static [&'static str],
    /// True if supervised training uses it too, and not only rollouts of several turns.
    pub trains: bool,
}

/// Arguments of a call that are an object, which DeepSeek's templates append to text.
const ARGUMENTS: (&str, &str) = (
    "+ tool['function']['arguments'] +",
    "+ (tool['function']['arguments'] if tool['function']['arguments'] is string else tool['function']['arguments'] | \
     tojson) +",
);

/// A turn as it was sampled, with the token that ends it: a call, or an answer.
const SAMPLED_HARMONY: &str = "{%- if message.role == 'assistant' and message.content is string \
    and ('<|channel|>' in message.content or '<|message|>' in message.content) -%}\
    {{- '<|start|>assistant' + message.content }}\
    {%- set header = message.content.split('<|start|>')[-1].split('<|message|>')[0] %}\
    {%- if 'to=' in header %}\
        {{- '<|call|>' }}\
        {%- set last_tool_call.name = header.split('to=')[-1].split('<|')[0].split(' ')[0].split('functions.')[-1] %}\
    {%- else %}\
        {{- '<|return|>' }}\
    {%- endif %}\
    {%- elif message.role == 'assistant' -%}";

/// Every family whose conditions are all there. TRL has such templates too (`chat_templates/*_training.jinja`).
static VARIANTS: [Variant; 5] = [
    Variant {
        family: "Qwen 3",
        edits: &[
            ("loop.index0 > ns.last_query_index", "true"),
            ("loop.last or (not loop.last and reasoning_content)", "true"),
        ],
        has: &[],
        trains: true,
    },
    Variant { family: "Qwen 3.5", edits: &[("loop.index0 > ns.last_query_index", "true")], has: &[], trains: true },
    Variant {
        family: "DeepSeek",
        edits: &[
            // the generation prompt has the tag that opens the reasoning
            (
                "{% set content = content.split('</think>')[-1] %}",
                r"{% if not content.startswith('<think>') %}{% set content = '<think>\n' + content %}{% endif %}",
            ),
            ARGUMENTS,
        ],
        has: &[],
        trains: true,
    },
    Variant {
        family: "DeepSeek V3.1",
        edits: &[
            // the generation prompt has the tag that opens the reasoning, or the one that ends it
            ("message['prefix'] is defined and message['prefix'] and thinking", "'</think>' in message['content']"),
            (
                "content.split('</think>', 1)[1]",
                "content.split('<think>', 1)[1] if content.startswith('<think>') else content",
            ),
            ARGUMENTS,
        ],
        has: &[],
        trains: true,
    },
    Variant {
        family: "gpt-oss",
        // it takes reasoning, answers and calls as fields, and drops the reasoning before earlier answers
        edits: &[("{%- if message.role == 'assistant' -%}", SAMPLED_HARMONY)],
        has: &["<|start|>assistant", "last_tool_call.name"],
        trains: false,
    },
];

impl Variant {
    /// The family of a template.
    pub fn find(template: &str) -> Option<&'static Self> {
        VARIANTS.iter().find(|variant| {
            let mut parts = variant.edits.iter().map(|(from, _)| from).chain(variant.has);
            parts.all(|part| template.contains(part))
        })
    }

    /// The template for training of a template of this family.
    pub fn apply(&self, template: &str) -> String {
        self.edits.iter().fold(template.to_owned(), |text, (from, to)| text.replace(from, to))
    }
}
