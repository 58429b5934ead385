//! A run folder read back, as a report shows it.
//!
//! [`Report::read`] reads any number of runs. Scalars are those of all steps, in columns of six significant digits;
//! texts are those of a stated selection of samples, cut where they are long, so that the size is bounded. A run need
//! not have ended: what is missing or cut off is said in [`RunReport::notes`]. [`Report::to_json`] is what
//! `docs/guides/monitoring.md` calls the data block.
//!
//! A [`RunView`] is a run as it is shown. [`ViewUpdate`]s feed it: of the run's own events, or of a [`Follower`] of its
//! folder. A report reads the folder at once.

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
