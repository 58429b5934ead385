//! The error when no plan fits: the missing bytes, and changes that would make one fit.

use crate::size::Bytes;
use std::fmt;

/// No plan fits the budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Infeasible {
    /// The budget.
    pub budget_bytes: u64,
    /// The budget without the margin.
    pub allowed_bytes: u64,
    /// Bytes of the smallest plan; absent if none keeps within the host's budget.
    pub smallest_bytes: Option<u64>,
    /// The host's budget, if there is one.
    pub host_budget_bytes: Option<u64>,
    /// The largest category of the smallest plan's largest phase.
    pub largest: String,
    /// The degrees that come closest, where they were to be chosen.
    pub spread: Option<String>,
    /// Changes that would make a plan fit.
    pub advice: Vec<String>,
}

impl Infeasible {
    /// Bytes that are missing.
    pub fn over_by(&self) -> Option<u64> {
        self.smallest_bytes.map(|bytes| bytes.saturating_sub(self.allowed_bytes))
    }
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed = Bytes(self.allowed_bytes);
        write!(f, "no plan fits {}", Bytes(self.budget_bytes))?;
        if self.allowed_bytes < self.budget_bytes {
            write!(f, " ({allowed} after the margin)")?;
        }
        if let Some(spread) = &self.spread {
            write!(f, " on {spread}, which comes closest")?;
        }
        match (self.smallest_bytes, self.over_by(), self.host_budget_bytes) {
            (Some(smallest), Some(over), _) => {
                write!(f, ": the smallest one needs {}, {} too much; {}", Bytes(smallest), Bytes(over), self.largest)?;
            }
            (_, _, Some(host)) => write!(f, ": none stays within memory.host_budget, {}; raise it", Bytes(host))?,
            _ => {}
        }
        if self.advice.is_empty() {
            return write!(f, ". No single change of model, length or batch would be enough");
        }
        write!(f, ". One of these changes is enough:")?;
        self.advice.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}
