//! `NeMo RL`'s keys and what they become: those of its memory guide, and those of its GRPO configurations (2025 and
//! 2026).

mod grpo;
mod guide;
mod policy;

use super::key_mapping::KeyRule;

/// All tables.
pub(super) const TABLES: &[&[KeyRule]] = &[guide::TABLE, policy::TABLE, grpo::TABLE];
