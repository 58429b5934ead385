//! Chat templates for training, of model families whose template writes a turn otherwise once others follow.
//!
//! They drop the reasoning of earlier turns, or write an empty one before the last turn only. Trained on them, earlier
//! turns would be learnt without reasoning; sampled from, a rollout of several turns would not be what the template
//! writes. A family is recognized by conditions of its template, which are replaced: all else stays as it is.

/// A family: its name, and what is replaced in its template.
struct Variant {
    family: &'static str,
    edits: &'static [(&'static str, &'static str)],
}

/// Every family whose conditions are all there. TRL has such templates too (`chat_templates/*_training.jinja`).
const VARIANTS: [Variant; 3] = [
    Variant {
        family: "Qwen 3",
        edits: &[
            ("loop.index0 > ns.last_query_index", "true"),
            ("loop.last or (not loop.last and reasoning_content)", "true"),
        ],
    },
    Variant { family: "Qwen 3.5", edits: &[("loop.index0 > ns.last_query_index", "true")] },
    Variant {
        family: "DeepSeek",
        edits: &[
            // the generation prompt has the tag that opens the reasoning
            (
                "{% set content = content.split('</think>')[-1] %}",
                r"{% if not content.startswith('<think>') %}{% set content = '<think>\n' + content %}{% endif %}",
            ),
            (
                "+ tool['function']['arguments'] +",
                "+ (tool['function']['arguments'] if tool['function']['arguments'] is string else \
                 tool['function']['arguments'] | tojson) +",
            ),
        ],
    },
];

/// The family of a template, and its template for training.
pub(super) fn variant(template: &str) -> Option<(&'static str, String)> {
    let known = VARIANTS.iter().find(|own| own.edits.iter().all(|(from, _)| template.contains(from)))?;
    let edited = known.edits.iter().fold(template.to_owned(), |text, (from, to)| text.replace(from, to));
    Some((known.family, edited))
}
