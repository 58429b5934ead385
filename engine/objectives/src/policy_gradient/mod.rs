//! The policy-gradient family: one composition of advantages, a policy loss, masks, corrections, KL terms, an entropy
//! bonus and an aggregation.

mod advantages;
mod composition;
mod loss;
mod prepare;

pub use composition::{Advantages, PolicyGradient};

#[cfg(test)]
mod tests;
