//! A new configuration: five answers, checked, and the commented YAML that they make.

mod answers;
mod rows;
mod yaml;

/// Examples that need no other file, by name.
pub const EXAMPLES: [(&str, &str); 5] = [
    ("arithmetic", include_str!("../examples/arithmetic.yaml")),
    ("calculator", include_str!("../examples/calculator.yaml")),
    ("constrained", include_str!("../examples/constrained.yaml")),
    ("memory_constrained_ppo", include_str!("../examples/memory_constrained_ppo.yaml")),
    ("ppo_arithmetic", include_str!("../examples/ppo_arithmetic.yaml")),
];

pub use answers::{Answers, Data, Memory, Model, Reward};
pub use yaml::write;

#[cfg(test)]
mod tests;
