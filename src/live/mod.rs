//! The live view of a run in a terminal.
//!
//! The picture is a function of a [`LiveState`](state::LiveState), plain data that
//! [`ViewUpdate`](firebrick::report::ViewUpdate) change: from the run's events ([`feed`]), or from a growing run
//! folder. A separate thread draws ([`screen`]), so that training never waits for a terminal.

mod curves;
mod feed;
mod headline;
mod help;
mod keys;
mod metrics;
mod notes;
mod numbers;
mod phases;
mod picture;
mod samples;
mod screen;
mod state;
mod steering;
mod terminal;
mod texts;
mod theme;
mod view;

#[cfg(test)]
mod tests;

pub use feed::Live;
pub use picture::picture;
pub use screen::{UpdateSource, show};
pub use state::LiveState;
pub use terminal::{can_show, continued, restore};
pub use theme::Theme;
