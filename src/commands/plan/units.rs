//! Bytes and seconds as tables show them.

use firebrick::engine::plan::PlanReport;
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

/// The seconds of a phase; of one that takes none that are estimated, a dash.
pub fn seconds(report: &PlanReport, phase: &str) -> String {
    let s = &report.seconds;
    match phase {
        "rollout" => duration(s.rollout),
        "score" => duration(s.score),
        "backward" => duration(s.backward),
        "optimizer" => duration(s.optimizer),
        "values" => duration(s.values),
        "critic_backward" => duration(s.critic_backward),
        "critic_optimizer" => duration(s.critic_optimizer),
        _ => "-".into(),
    }
}
