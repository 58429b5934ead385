//! Live allocations at the peak of the traced allocations.

use super::format::{MemoryTimeline, TraceTable};
use firebrick_backends::accounts::Account;
use firebrick_backends::allocation_trace::TraceSource;
use serde::Serialize;
use std::collections::BTreeMap;

/// Traced allocations that were live at their peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveAllocations {
    /// Source of the trace.
    pub source: TraceSource,
    /// Minimum size of a traced allocation.
    pub least_bytes: u64,
    /// Bytes of all allocations.
    pub bytes: u64,
    /// Number of allocations.
    pub count: u64,
    /// Groups by stack or account and by phase, the largest first.
    pub groups: Vec<LiveGroup>,
}

/// Allocations of one stack or account, made in one phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveGroup {
    /// Bytes of all allocations.
    pub bytes: u64,
    /// Number of allocations.
    pub count: u64,
    /// The phase; `None` before the first.
    pub phase: Option<String>,
    /// The account, if known.
    pub account: Option<Account>,
    /// Functions of the call stack, the innermost first; empty if unknown.
    pub stack: Vec<String>,
}

/// Stack, account and phase of a group.
type Key = (Option<usize>, Option<usize>, Option<usize>);

impl LiveAllocations {
    /// Live allocations of a timeline, if it has a trace.
    pub fn new(timeline: &MemoryTimeline) -> Option<Self> {
        let trace = timeline.trace.as_ref()?;
        let (_, (bytes, end)) = replay(trace, trace.events.len());
        let (live, _) = replay(trace, end);
        let mut groups: BTreeMap<Key, (u64, u64)> = BTreeMap::new();
        let e = &trace.events;
        for &event in live.values() {
            let key = (e.stack[event], e.account[event], e.phase[event]);
            let (bytes, count) = groups.entry(key).or_default();
            *bytes += e.bytes[event];
            *count += 1;
        }
        let group = |((stack, account, phase), (bytes, count)): (Key, (u64, u64))| LiveGroup {
            bytes,
            count,
            phase: phase.map(|p| timeline.phases[p].name.clone()),
            account: account.map(|a| timeline.accounts[a].account),
            stack: stack.map_or_else(Vec::new, |stack| {
                let functions = trace.stacks[stack].iter();
                functions.map(|&f| trace.functions[f].clone()).collect()
            }),
        };
        let mut groups: Vec<LiveGroup> = groups.into_iter().map(group).collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.bytes));
        Some(Self { source: trace.source, least_bytes: trace.least_bytes, bytes, count: live.len() as u64, groups })
    }
}

/// Allocations that are live after the first `end` events, by id, and the peak of live bytes until then, with the
/// number of events before it.
fn replay(trace: &TraceTable, end: usize) -> (BTreeMap<u64, usize>, (u64, usize)) {
    let e = &trace.events;
    let (mut live, mut bytes, mut peak) = (BTreeMap::new(), 0, (0, 0));
    for event in 0..end {
        // a release without its allocation says nothing
        let Some(id) = e.id[event] else { continue };
        if e.released[event] == 0 {
            live.insert(id, event);
            bytes += e.bytes[event];
            if bytes > peak.0 {
                peak = (bytes, event + 1);
            }
        } else if let Some(allocation) = live.remove(&id) {
            bytes -= e.bytes[allocation];
        }
    }
    (live, peak)
}

#[cfg(test)]
mod tests {
    use super::super::format::TraceEvents;
    use super::super::tests::two_steps;
    use super::*;

    #[test]
    fn allocations_that_were_live_together_are_grouped_by_stack() {
        let mut timeline = two_steps();
        // id, bytes, stack; a release has no stack
        let events = [
            (Some(0), 100, Some(0)),
            (Some(1), 50, Some(1)),
            (Some(2), 30, Some(1)),
            (None, 70, None),
            (Some(0), 100, None),
            (Some(3), 60, Some(0)),
        ];
        let count = events.len();
        timeline.trace = Some(TraceTable {
            source: TraceSource::Heap,
            least_bytes: 10,
            dropped: 0,
            functions: vec!["a".into(), "b".into()],
            stacks: vec![vec![0], vec![0, 1]],
            events: TraceEvents {
                released: events.iter().map(|e| u8::from(e.2.is_none())).collect(),
                id: events.iter().map(|e| e.0).collect(),
                bytes: events.iter().map(|e| e.1).collect(),
                step: vec![1; count],
                phase: vec![Some(0); count],
                place: vec![Some(0); count],
                segment: vec![None; count],
                account: vec![None; count],
                stack: events.iter().map(|e| e.2).collect(),
            },
        });
        let live = LiveAllocations::new(&timeline).expect("there is a trace");
        assert_eq!((live.bytes, live.count), (180, 3));
        let groups: Vec<_> = live.groups.iter().map(|g| (g.bytes, g.count, g.stack.join(" "))).collect();
        assert_eq!(groups, [(100, 1, "a".to_owned()), (80, 2, "a b".to_owned())]);
        assert_eq!(live.groups[0].phase.as_deref(), Some("update_actor"));
        timeline.trace = None;
        assert_eq!(LiveAllocations::new(&timeline), None);
    }
}
