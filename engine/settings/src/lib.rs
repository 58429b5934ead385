//! Settings that are defined once: a field of a struct with its doc comment, its default, and attributes of serde and
//! schemars. The JSON Schema that these make lists [keys](keys()) for explanations and reference pages, and
//! [`violations`] holds any value to it.
//!
//! | attribute of a field or variant | meaning |
//! |---|---|
//! | `#[schemars(range(min = 1, max = 3))]` | least and largest number |
//! | `#[schemars(extend("exclusiveMinimum" = 0))]` | bound that the number must not reach |
//! | `#[schemars(extend("x-with" = "other"))]` | the key has an effect only if key `other` is on: not null, false or 0 |
//! | `#[schemars(extend("x-with" = {"other": ["a", "b"]}))]` | the same, with the values that `other` must have |
//! | `#[schemars(extend("x-because" = "…"))]` | why the bound is one, for messages |
//! | `#[schemars(extend("x-alias" = ["b"]))]` | other names, which serde's `alias` reads |

#![forbid(unsafe_code)]

mod check;
mod choice;
mod keys;
mod schema;

pub use check::{Violation, is_on, violations, violations_of};
pub use choice::{add_choice, flat_choice};
pub use keys::{Key, keys, nearest_keys};
pub use schema::{lay_defaults, schema_of};

#[cfg(test)]
mod tests;
