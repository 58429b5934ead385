//! `firebrick memory`: a run's memory timeline.

use crate::arguments::MemoryArgs;
use crate::output;
use crate::table::Table;
use firebrick::backends::allocation_trace::TraceSource;
use firebrick::engine::executor::BoundaryKind;
use firebrick::engine::metrics::timeline::{
    Holder, LiveAllocations, LiveGroup, MemoryTimeline, PeakReport, Reason, TimelineReport, When,
};
use firebrick::engine::plan::size::Bytes;
use firebrick::spec::memory::Account;
use std::fmt::Write;

/// Most printed groups of live allocations; `--json` has all.
const MAX_GROUPS: usize = 12;

/// Most printed functions of a call stack.
const MAX_FRAMES: usize = 4;

pub fn run(args: &MemoryArgs) -> anyhow::Result<()> {
    let timeline = MemoryTimeline::load(&args.run)?;
    let report = TimelineReport::new(&timeline);
    output::print_as(args.json, &report, || tables(&report))
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

/// Description of a time.
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
    let holder = |holder: &Holder| {
        let Account { category, home, model } = holder.account;
        let share = holder.share.map_or_else(String::new, percent);
        vec![category.name().into(), home.name().into(), model.name().into(), bytes(holder.bytes), share]
    };
    let rest = peak.unaccounted_bytes.map(|rest| {
        let share = percent(rest as f64 / peak.bytes.max(1) as f64);
        vec!["in no account".into(), String::new(), String::new(), bytes(rest), share]
    });
    let rows = peak.holders.iter().map(holder).chain(rest);
    Table::new(3, &["HELD AT THE PEAK", "HOME", "MODEL", "BYTES", "SHARE"]).rows(rows).render()
}

/// Bytes by category, with the prediction and the step before.
fn categories(peak: &PeakReport) -> String {
    let rows = peak.categories.iter().map(|category| {
        let change = category.before_bytes.map(|before| {
            let sign = if category.bytes < before { "-" } else { "+" };
            match category.bytes.abs_diff(before) {
                0 => "0 B".to_owned(),
                difference => format!("{sign}{}", bytes(difference)),
            }
        });
        let [predicted, before] = [category.predicted_bytes, category.before_bytes].map(maybe);
        let change = change.unwrap_or_else(|| "-".into());
        vec![category.category.name().into(), bytes(category.bytes), predicted, before, change]
    });
    let table = Table::new(1, &["CATEGORY", "PEAK", "PREDICTED", "STEP BEFORE", "CHANGE"]).rows(rows).render();
    let before = peak.before.as_ref().map(|before| format!("step before: {}\n", when(before)));
    table + &before.unwrap_or_else(|| "the step before is not in the timeline\n".to_owned())
}

fn phases(report: &TimelineReport) -> String {
    let rows = report.phases.iter().map(|phase| {
        let at = format!("step {}, {}", phase.when.step, place(&phase.when));
        let [between, predicted] = [phase.peak_bytes, phase.predicted_bytes].map(maybe);
        vec![phase.when.phase.clone(), at, bytes(phase.bytes), between, predicted]
    });
    let table = Table::new(2, &["PHASE", "LARGEST BOUNDARY", "BYTES", "BETWEEN", "PREDICTED"]).rows(rows);
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
    let (shown, rest) = live.groups.split_at(live.groups.len().min(MAX_GROUPS));
    let rows = shown.iter().map(|group| {
        let phase = group.phase.as_deref().unwrap_or("set-up").to_owned();
        vec![phase, bytes(group.bytes), group.count.to_string(), made_by(group)]
    });
    text += &Table::new(1, &["MADE IN", "BYTES", "COUNT", "BY"]).ends_with_text().rows(rows).render();
    if !rest.is_empty() {
        let sum: u64 = rest.iter().map(|group| group.bytes).sum();
        let _ = writeln!(text, "and {} in {} other groups", bytes(sum), rest.len());
    }
    text
}

/// An account, or this program's functions of a stack, the innermost first.
fn made_by(group: &LiveGroup) -> String {
    if let Some(account) = group.account {
        let (category, home) = (account.category.name(), account.home.name());
        return format!("{category} {home} {}", account.model.name());
    }
    let is_ours = |name: &&String| name.contains("firebrick");
    let has_ours = group.stack.iter().any(|name| is_ours(&name));
    let frames = group.stack.iter().filter(|name| !has_ours || is_ours(name));
    let names: Vec<&str> =
        frames.take(MAX_FRAMES).map(|name| name.strip_prefix("firebrick_").unwrap_or(name)).collect();
    if names.is_empty() { "unknown".to_owned() } else { names.join(" < ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick::engine::metrics::timeline::{CategoryBytes, PhasePeak};
    use firebrick::spec::memory::{Category, Home, Role};

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
