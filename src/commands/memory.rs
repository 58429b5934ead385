//! `firebrick memory`: what a run's memory timeline says.

use crate::arguments::MemoryArgs;
use crate::output;
use crate::table::Table;
use firebrick::backends::allocation_trace::TraceSource;
use firebrick::engine::executor::BoundaryKind;
use firebrick::engine::metrics::timeline::{
    LiveAllocations, LiveGroup, MemoryTimeline, PeakReport, Reason, TimelineReport, When,
};
use firebrick::engine::plan::size::Bytes;
use std::fmt::Write;

/// Groups of live allocations that are printed; `--json` has all.
const GROUPS: usize = 12;

/// Functions of a call stack that are printed.
const FRAMES: usize = 4;

pub fn run(args: &MemoryArgs) -> anyhow::Result<()> {
    let timeline = MemoryTimeline::load(&args.run)?;
    let report = TimelineReport::new(&timeline);
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { tables(&report) };
    output::print(&text)
}

fn bytes(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// A number that may be missing.
fn maybe(value: Option<u64>) -> String {
    value.map_or_else(|| "-".to_owned(), bytes)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn tables(report: &TimelineReport) -> String {
    let mut text = heading(report);
    let Some(peak) = &report.peak else {
        return text + "no boundaries were reached\n";
    };
    // writing to a string cannot fail
    let _ = write!(text, "\npeak    {} at a boundary, {}\n", bytes(peak.bytes), when(&peak.when));
    if let Some(most) = peak.peak_bytes.filter(|&most| most > peak.bytes) {
        let _ = writeln!(text, "        up to {} between boundaries before it", bytes(most));
    }
    if let (Some(predicted), Some(moment)) = (peak.predicted_bytes, &peak.predicted_moment) {
        let _ = writeln!(text, "plan    {} predicted, at: {moment}", bytes(predicted));
    }
    let sections = [holders(peak), categories(peak), phases(report)];
    for section in sections {
        text += "\n";
        text += &section;
    }
    if let Some(live) = &report.live {
        text += "\n";
        text += &live_table(live);
    }
    text
}

fn heading(report: &TimelineReport) -> String {
    let steps = match &report.steps[..] {
        [] => "none".to_owned(),
        [one] => one.to_string(),
        [first, .., last] => format!("{first} to {last}"),
    };
    let why = match report.reason {
        Reason::Snapshot => "memory.snapshot",
        Reason::Ended => "memory.snapshot, ended early by the end of the run",
        Reason::OutOfMemory => "the latest of a run that ended out of memory",
        Reason::Failed => "memory.snapshot, ended early by the error",
    };
    let mut text = format!("device  {}\nsteps   {steps}; {} boundaries: {why}\n", report.device, report.boundaries);
    if report.dropped > 0 {
        let _ = writeln!(
            text,
            "        {} earlier boundaries of step {} are missing",
            report.dropped,
            report.steps.first().copied().unwrap_or(0)
        );
    }
    if let Some(error) = &report.error {
        let _ = writeln!(text, "error   {}", error.replace('\n', "\n        "));
    }
    text
}

/// A moment in words.
fn when(when: &When) -> String {
    format!("step {}, {}, {}, {:.3} s into the step", when.step, when.phase, place(when), when.seconds)
}

fn place(when: &When) -> String {
    let what = match when.place {
        BoundaryKind::Begin => "at its beginning",
        BoundaryKind::Sample => "after a completion",
        BoundaryKind::Forward => "forward",
        BoundaryKind::Head => "at the head",
        BoundaryKind::Graph => "graph",
        BoundaryKind::Backward => "backward",
        BoundaryKind::Embedding => "embedding's gradient",
        BoundaryKind::Update => "update of unit",
        BoundaryKind::OutOfMemory => "out of memory",
        BoundaryKind::Replanned => "under another plan",
        BoundaryKind::End => "at its end",
    };
    match (when.place, when.segment) {
        (_, None) => what.to_owned(),
        (BoundaryKind::Update, Some(unit)) => format!("{what} {unit}"),
        (_, Some(segment)) => format!("{what} of segment {segment}"),
    }
}

/// Who held the bytes of the peak.
fn holders(peak: &PeakReport) -> String {
    let mut table = Table::new(3, &["HELD AT THE PEAK", "HOME", "MODEL", "BYTES", "SHARE"]);
    for holder in &peak.holders {
        table.row(vec![
            holder.account.category.name().into(),
            holder.account.home.name().into(),
            holder.account.model.name().into(),
            bytes(holder.bytes),
            holder.share.map_or_else(String::new, percent),
        ]);
    }
    if let Some(rest) = peak.unaccounted_bytes {
        table.row(vec![
            "in no account".into(),
            String::new(),
            String::new(),
            bytes(rest),
            percent(rest as f64 / peak.bytes.max(1) as f64),
        ]);
    }
    table.render()
}

/// Bytes by category beside the prediction and the step before.
fn categories(peak: &PeakReport) -> String {
    let header = ["CATEGORY", "PEAK", "PREDICTED", "STEP BEFORE", "CHANGE"];
    let mut table = Table::new(1, &header);
    for category in &peak.categories {
        let change = category.before_bytes.map(|before| {
            let sign = if category.bytes < before { "-" } else { "+" };
            match category.bytes.abs_diff(before) {
                0 => "0 B".to_owned(),
                difference => format!("{sign}{}", bytes(difference)),
            }
        });
        table.row(vec![
            category.category.name().into(),
            bytes(category.bytes),
            maybe(category.predicted_bytes),
            maybe(category.before_bytes),
            change.unwrap_or_else(|| "-".into()),
        ]);
    }
    let before = match &peak.before {
        Some(before) => format!("step before: {}\n", when(before)),
        None => "the step before is not in the timeline\n".to_owned(),
    };
    table.render() + &before
}

fn phases(report: &TimelineReport) -> String {
    let header = ["PHASE", "LARGEST BOUNDARY", "BYTES", "BETWEEN", "PREDICTED"];
    let mut table = Table::new(2, &header);
    for phase in &report.phases {
        let at = &phase.when;
        table.row(vec![
            at.phase.clone(),
            format!("step {}, {}", at.step, place(at)),
            bytes(phase.bytes),
            maybe(phase.peak_bytes),
            maybe(phase.predicted_bytes),
        ]);
    }
    table.render() + "between: the maximum in use at any time of the phase, if it is counted\n"
}

/// The largest live allocations of a trace.
fn live_table(live: &LiveAllocations) -> String {
    let what = match live.source {
        TraceSource::Heap => "allocations",
        TraceSource::Accounts => "holds of accounts",
    };
    let mut text =
        format!("at most {} traced {what} were live at the same time, {} in total\n", live.count, bytes(live.bytes));
    let mut table = Table::new(1, &["MADE IN", "BYTES", "COUNT", "BY"]).ends_with_text();
    let mut groups = live.groups.iter();
    for group in groups.by_ref().take(GROUPS) {
        let phase = group.phase.as_deref();
        table.row(vec![
            phase.unwrap_or("set-up").to_owned(),
            bytes(group.bytes),
            group.count.to_string(),
            made_by(group),
        ]);
    }
    let rest: Vec<&LiveGroup> = groups.collect();
    text += &table.render();
    if !rest.is_empty() {
        let sum: u64 = rest.iter().map(|group| group.bytes).sum();
        let _ = writeln!(text, "and {} in {} other groups", bytes(sum), rest.len());
    }
    text
}

/// An account, or the functions of this program that a stack goes through, the innermost first.
fn made_by(group: &LiveGroup) -> String {
    if let Some(account) = group.account {
        let (category, home) = (account.category.name(), account.home.name());
        return format!("{category} {home} {}", account.model.name());
    }
    let own = group.stack.iter().filter(|name| name.contains("firebrick"));
    let own: Vec<&String> = own.collect();
    let frames = if own.is_empty() { group.stack.iter().collect() } else { own };
    let names: Vec<&str> = frames.into_iter().take(FRAMES).map(|n| short(n)).collect();
    if names.is_empty() {
        return "unknown".to_owned();
    }
    names.join(" < ")
}

/// A function's name without the crate's prefix.
fn short(name: &str) -> &str {
    name.strip_prefix("firebrick_").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick::engine::metrics::timeline::{CategoryBytes, Holder, PhasePeak};
    use firebrick::spec::memory::{Account, Category, Home, Role};

    fn moment(step: u64, place: BoundaryKind, segment: Option<u32>) -> When {
        When { step, phase: "update_actor".into(), place, segment, seconds: 0.25 }
    }

    fn report() -> TimelineReport {
        let peak = moment(2, BoundaryKind::Graph, Some(1));
        TimelineReport {
            reason: Reason::OutOfMemory,
            error: Some("out of memory: the update_actor phase\n  gradients".into()),
            device: "cpu (CPU)".into(),
            steps: vec![1, 2],
            boundaries: 9,
            dropped: 3,
            peak: Some(PeakReport {
                when: peak.clone(),
                bytes: 4 << 20,
                peak_bytes: Some(5 << 20),
                predicted_bytes: Some(3 << 20),
                predicted_moment: Some("a segment's backward".into()),
                holders: vec![Holder {
                    account: Account { category: Category::Gradients, home: Home::Device, model: Role::Critic },
                    bytes: 1 << 20,
                    share: Some(0.25),
                }],
                unaccounted_bytes: Some(3 << 20),
                before: Some(moment(1, BoundaryKind::Update, Some(4))),
                categories: vec![CategoryBytes {
                    category: Category::Gradients,
                    bytes: 1 << 20,
                    predicted_bytes: Some(1 << 20),
                    before_bytes: Some(3 << 20),
                }],
            }),
            phases: vec![PhasePeak { when: peak, bytes: 4 << 20, peak_bytes: None, predicted_bytes: Some(3 << 20) }],
            live: Some(LiveAllocations {
                source: TraceSource::Heap,
                least_bytes: 65_536,
                bytes: 3 << 20,
                count: 2,
                groups: vec![
                    LiveGroup {
                        bytes: 2 << 20,
                        count: 1,
                        phase: Some("update_actor".into()),
                        account: None,
                        stack: vec![
                            "burn_flex::ops::add".into(),
                            "firebrick_engine::executor::head".into(),
                            "firebrick_engine::learner".into(),
                        ],
                    },
                    LiveGroup { bytes: 1 << 20, count: 1, phase: None, account: None, stack: Vec::new() },
                ],
            }),
        }
    }

    #[test]
    fn the_tables_name_the_peak_its_holders_the_step_before_and_the_stacks() {
        let text = tables(&report());
        for line in [
            "steps   1 to 2; 9 boundaries: the latest of a run that ended out of memory",
            "3 earlier boundaries of step 1 are missing",
            "error   out of memory: the update_actor phase\n          gradients",
            "peak    4.00 MiB at a boundary, step 2, update_actor, graph of segment 1, 0.250 s into the step",
            "up to 5.00 MiB between boundaries",
            "plan    3.00 MiB predicted, at: a segment's backward",
            "gradients         device  critic  1.00 MiB  25.0 %",
            "in no account                     3.00 MiB  75.0 %",
            "gradients  1.00 MiB   1.00 MiB     3.00 MiB  -2.00 MiB",
            "step before: step 1, update_actor, update of unit 4, 0.250 s",
            "update_actor  step 2, graph of segment 1",
            "at most 2 traced allocations were live at the same time, 3.00 MiB in total",
            "update_actor  2.00 MiB      1  engine::executor::head < engine::learner",
            "set-up        1.00 MiB      1  unknown",
        ] {
            assert!(text.contains(line), "{line:?} is not in:\n{text}");
        }
        assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
    }

    #[test]
    fn a_timeline_without_boundaries_says_so() {
        let empty = TimelineReport { peak: None, phases: Vec::new(), live: None, ..report() };
        assert!(tables(&empty).ends_with("no boundaries were reached\n"));
    }
}
