//! `docs/reference/metrics.md`, from the table of metrics.

use super::fill;
use firebrick::engine::metrics::METRICS;
use std::fmt::Write;

const INTRODUCTION: &str = "Each step appends a line to `metrics.jsonl` of the run folder: a JSON object of the metrics below \
by name. Trackers get the same values. Names are verl's if verl has the metric; `{…}` is a part that depends on the run. This \
page is generated from `engine/src/metrics/described.rs`.";

pub fn render() -> String {
    let mut page = format!("# Metrics\n\n{}", fill("", INTRODUCTION));
    for (group, metrics) in METRICS {
        let _ = write!(page, "\n## {group}\n\n");
        for metric in *metrics {
            let unit = if metric.unit.is_empty() { String::new() } else { format!(" ({})", metric.unit) };
            page.push_str(&fill("- ", &format!("`{}`{unit}: {}", metric.name, metric.meaning)));
        }
    }
    page
}
