//! Bytes and seconds as tables show them.

use firebrick::engine::plan::PlanReport;
use firebrick::engine::plan::estimate::EstimatePhase;
use firebrick::engine::plan::size::Bytes;

pub fn bytes(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 600.0 => format!("{:.0} min", s / 60.0),
        s if s >= 10.0 => format!("{s:.0} s"),
        s if s >= 0.1 => format!("{s:.1} s"),
        s => format!("{:.1} ms", s * 1e3),
    }
}

/// Messages of a kind: their number, bytes and time.
pub fn traffic(kind: &str, messages: u64, sent: u64, seconds: f64) -> String {
    let (bytes, duration) = (bytes(sent), duration(seconds));
    format!("{kind} {messages} x, {bytes}, {duration}")
}

/// The seconds of a phase; a dash without an estimate.
pub fn seconds(report: &PlanReport, phase: EstimatePhase) -> String {
    let phases = report.seconds.by_phase().into_iter();
    // seconds of reward models are only in the step's total
    let mut seconds = phases.filter(|(name, _)| *name == phase && *name != EstimatePhase::Reward);
    seconds.next().map_or_else(|| "-".into(), |(_, s)| duration(s))
}
