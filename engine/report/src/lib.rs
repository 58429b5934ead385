//! Reports and views of run folders.
//!
//! [`Report::read`] reads any number of runs. Scalars cover all steps, in columns of six significant digits;
//! texts cover a selection of samples and are cut if long, so that the size is bounded. A run need
//! not have ended: [`RunReport::notes`] lists missing and cut parts. [`Report::to_json`] is
//! the data block of `docs/guides/monitoring.md`.
//!
//! A [`RunView`] is the state of a live view. [`ViewUpdate`]s feed it, from the run's events or from a [`Follower`] of
//! its folder. A report reads the folder once.

#![forbid(unsafe_code)]

mod excerpt;
mod folder;
mod follow;
mod lines;
mod memory;
mod numbers;
mod reader;
mod run;
mod samples;
mod scalars;
mod selection;
mod settings;
mod text;
mod tokens;
mod view;
mod view_update;

pub use excerpt::{Excerpt, ParsedAnswer, Pick, picks};
pub use follow::{Follower, LOG};
pub use memory::{AccountSeries, MemoryHistory, MemoryReadings, PhaseReadings, TimelineView};
pub use numbers::Number;
pub use reader::AnswerReader;
pub use run::{Report, RunReport};
pub use samples::{GroupView, RewardHistogram, SampleView, Samples};
pub use scalars::Scalars;
pub use selection::Tag;
pub use text::Text;
pub use tokens::{OneOrEach, TokensView};
pub use view::{Note, RunView, ShownSample};
pub use view_update::{Planned, ViewUpdate};
