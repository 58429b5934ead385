//! Profiles: traces of some steps of a run for Perfetto.

mod perfetto;
mod profiler;
mod tracks;

pub use profiler::Profiler;
