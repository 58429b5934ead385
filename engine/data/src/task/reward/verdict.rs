//! What a rule says of a completion.

use crate::task::Reading;

/// A rule's value, and what it is founded on.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RuleVerdict {
    /// The value.
    pub value: f64,
    /// What was read in the completion.
    pub parsed: Option<String>,
    /// The ground truth as the rule reads it.
    pub gold: Option<String>,
    /// Why the rule cannot tell, where it cannot.
    pub undecided: Option<String>,
}

impl RuleVerdict {
    /// A value that is founded on no single piece of the text.
    pub fn value(value: f64) -> Self {
        Self { value, ..Self::default() }
    }

    /// 1 or 0, from what was read and what it was compared with.
    pub fn of(right: bool, parsed: Option<&str>, gold: &str) -> Self {
        Self {
            value: if right { 1.0 } else { 0.0 },
            parsed: parsed.map(Reading::short),
            gold: Some(Reading::short(gold)),
            undecided: None,
        }
    }
}
