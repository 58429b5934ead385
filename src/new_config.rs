//! A new configuration: five answers, checked, and the commented YAML that they make.

mod answers;
mod rows;
mod yaml;

pub use answers::{Answers, Data, Memory, Model, Reward};
pub use yaml::write;

#[cfg(test)]
mod tests;
