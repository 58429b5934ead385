//! Perfetto tracks of a recorded step.

use super::perfetto::{Trace, TracePacket, Track};
use crate::executor::{BoundaryKind, BoundaryRow, BoundaryRows};
use crate::metrics::phase::Phase;
use firebrick_backends::accounts::Account;
use firebrick_backends::trace::SpanRecord;
use prost::Message;

const PROCESS: Track = Track(1);
const TRAINING: Track = Track(2);
const SEGMENTS: Track = Track(3);
const IN_USE: Track = Track(4);
const RESERVED: Track = Track(5);
/// Counters of accounts follow, by [`Account::index`].
const ACCOUNTS: u64 = 16;

/// Spans of segments and of whole passes.
const PASSES: [&str; 7] =
    ["scoring", "segments forward", "head", "segments backward", "recompute", "embedding gradient", "optimizer"];

/// Records of a step.
pub(super) struct RecordedStep<'a> {
    /// Training step.
    pub step: u64,
    /// Start in nanoseconds of the trace.
    pub began: u64,
    /// Seconds of the step.
    pub seconds: f64,
    /// Spans in the order of their starts.
    pub spans: &'a [SpanRecord],
    /// Boundaries of this and other steps.
    pub boundaries: &'a BoundaryRows,
}

/// Start of a trace: the tracks that every trace has.
pub(super) fn head() -> Vec<u8> {
    let packet = vec![
        TracePacket::process(PROCESS, "firebrick"),
        TracePacket::track(TRAINING, PROCESS, "training"),
        TracePacket::track(SEGMENTS, PROCESS, "segments"),
        TracePacket::counter_track(IN_USE, PROCESS, "memory: in use"),
        TracePacket::counter_track(RESERVED, PROCESS, "memory: reserved"),
    ];
    Trace { packet }.encode_to_vec()
}

impl RecordedStep<'_> {
    /// The step as a part of a trace.
    pub fn encode(&self) -> Vec<u8> {
        let mut packet = Vec::new();
        self.slices(&mut packet);
        let rows = self.boundaries.rows.iter();
        let rows: Vec<_> = rows.filter(|(row, _)| row.moment.step == self.step).collect();
        self.segments(&rows, &mut packet);
        self.memory(&rows, &mut packet);
        Trace { packet }.encode_to_vec()
    }

    /// Nanoseconds of the trace at a time of the step in seconds.
    fn at(&self, seconds: f64) -> u64 {
        self.began + (seconds.clamp(0.0, self.seconds) * 1e9) as u64
    }

    /// Nested slices of the step, its phases and their spans.
    fn slices(&self, packets: &mut Vec<TracePacket>) {
        let end = self.at(self.seconds);
        let mut open = vec![end];
        packets.push(TracePacket::begin(TRAINING, self.began, format!("step {}", self.step), "step", 0.0));
        // times must not decrease by rounding
        let mut last = self.began;
        let mut close = |open: &mut Vec<u64>, depth: usize, packets: &mut Vec<TracePacket>| {
            while open.len() > depth {
                let end = open.pop().unwrap_or(last).max(last);
                packets.push(TracePacket::end(TRAINING, end));
                last = end;
            }
            last
        };
        for span in self.spans {
            let last = close(&mut open, span.depth + 1, packets);
            let begin = self.at(span.start).max(last);
            let within = open.last().copied().unwrap_or(end);
            let begin = begin.min(within);
            open.push(self.at(span.start + span.seconds).clamp(begin, within));
            packets.push(TracePacket::begin(TRAINING, begin, span.name.to_owned(), category(span), span.flops));
        }
        close(&mut open, 0, packets);
    }

    /// Slices between boundaries of a phase, named by the boundary at their end.
    fn segments(&self, rows: &[&(BoundaryRow, Vec<u64>)], packets: &mut Vec<TracePacket>) {
        for pair in rows.windows(2) {
            let (before, row) = (&pair[0].0, &pair[1].0);
            let boundary = row.moment.boundary;
            if before.moment.phase != row.moment.phase || boundary.place == BoundaryKind::Begin {
                continue;
            }
            let name = match boundary.segment {
                Some(segment) => format!("{} {segment}", boundary.place.name()),
                None => boundary.place.name().to_owned(),
            };
            let (begin, end) = (self.at(before.seconds), self.at(row.seconds));
            packets.push(TracePacket::begin(SEGMENTS, begin, name, "segment", 0.0));
            packets.push(TracePacket::end(SEGMENTS, end.max(begin)));
        }
    }

    /// Counters of the device's memory and of all accounts, at their changes.
    fn memory(&self, rows: &[&(BoundaryRow, Vec<u64>)], packets: &mut Vec<TracePacket>) {
        let accounts = &self.boundaries.accounts;
        for account in accounts {
            let name = account_name(*account);
            packets.push(TracePacket::counter_track(track(*account), PROCESS, &name));
        }
        let tracks: Vec<Track> = accounts.iter().map(|account| track(*account)).collect();
        let mut shown: Vec<Option<u64>> = vec![None; accounts.len() + 2];
        for (row, held) in rows {
            let read = [
                (IN_USE, row.reading.map(|reading| reading.in_use_bytes)),
                (RESERVED, row.reading.map(|reading| reading.reserved_bytes)),
            ];
            let held = tracks.iter().copied().zip(held.iter().copied().map(Some));
            for (shown, (track, bytes)) in shown.iter_mut().zip(read.into_iter().chain(held)) {
                if let Some(bytes) = bytes.filter(|_| *shown != bytes) {
                    packets.push(TracePacket::count(track, self.at(row.seconds), bytes));
                    *shown = Some(bytes);
                }
            }
        }
    }
}

fn track(account: Account) -> Track {
    Track(ACCOUNTS + account.index() as u64)
}

fn account_name(account: Account) -> String {
    format!("memory: {} ({}, {})", account.category.name(), account.model.name(), account.home.name())
}

/// Category of a span, a filter of the viewer.
fn category(span: &SpanRecord) -> &'static str {
    match span.name {
        "copy to device" | "copy to host" => "transfer",
        name if span.depth == 0 && Phase::from_name(name).is_some() => "phase",
        name if PASSES.contains(&name) => "pass",
        _ => "kernel",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Boundary, BoundaryLog};
    use firebrick_backends::accounts::{Accounts, Category, Home};

    fn span(name: &'static str, start: f64, seconds: f64, depth: usize) -> SpanRecord {
        SpanRecord { name, start, seconds, depth, flops: 2.0 }
    }

    /// Slices of a track with their depth and their nanoseconds, in the order of their ends; times must not run
    /// backwards.
    fn slices(packets: &[TracePacket], track: Track) -> Vec<(String, usize, u64)> {
        let (mut open, mut done, mut last) = (Vec::new(), Vec::new(), 0);
        for packet in packets {
            let Some(event) = &packet.track_event else {
                continue;
            };
            let at = packet.timestamp.unwrap();
            if event.track_uuid != track.0 {
                continue;
            }
            assert!(at >= last, "{at} comes after {last}");
            last = at;
            match (event.r#type, &event.name) {
                (1, Some(name)) => open.push((name.clone(), at)),
                _ => {
                    let (name, begun): (String, u64) = open.pop().expect("an open slice");
                    done.push((name, open.len(), at - begun));
                }
            }
        }
        assert!(open.is_empty(), "{open:?}");
        done
    }

    #[test]
    fn spans_nest_and_take_their_time_whatever_rounding_does() {
        let spans = [
            span("gen", 0.1, 0.2, 0),
            // it ends a hair after what it is in
            span("product", 0.1, 0.200_000_000_3, 1),
            span("update_actor", 0.3, 0.4, 0),
            span("head", 0.3, 0.4, 1),
            span("copy to host", 0.3, 0.4, 2),
        ];
        let step =
            RecordedStep { step: 4, began: 1000, seconds: 1.0, spans: &spans, boundaries: &BoundaryRows::default() };
        let trace = Trace::decode(&step.encode()[..]).unwrap();
        let recorded = slices(&trace.packet, TRAINING);
        let names: Vec<_> = recorded.iter().map(|(n, d, _)| (n.as_str(), *d)).collect();
        assert_eq!(
            names,
            [("product", 2), ("gen", 1), ("copy to host", 3), ("head", 2), ("update_actor", 1), ("step 4", 0)]
        );
        let close = |nanoseconds: u64, seconds: f64| (nanoseconds as f64 - seconds * 1e9).abs() < 2.0;
        assert!(close(recorded[1].2, 0.2) && close(recorded[4].2, 0.4) && close(recorded[5].2, 1.0), "{recorded:?}");
        let of = |name: &str| {
            let mut events = trace.packet.iter().filter_map(|p| p.track_event.as_ref());
            let event = events.find(|e| e.name.as_deref() == Some(name));
            event.map(|e| e.categories[0].clone()).unwrap_or_default()
        };
        let categories = ["step 4", "gen", "product", "head", "copy to host"].map(of);
        assert_eq!(categories, ["step", "phase", "kernel", "pass", "transfer"]);
    }

    #[test]
    fn boundaries_are_slices_and_what_is_held_at_them_counters() {
        let accounts = Accounts::new();
        let log = BoundaryLog::new(&accounts, None);
        log.begin_step(1, true);
        log.begin_phase(1, "gen", None);
        log.begin_step(2, true);
        log.begin_phase(2, "update_actor", None);
        let held = accounts.hold(Category::Gradients, Home::Device, 64);
        log.record(Boundary::at(BoundaryKind::Forward, 0), None);
        log.record(Boundary::at(BoundaryKind::Forward, 1), None);
        drop(held);
        log.record(BoundaryKind::End, None);
        let recorded = RecordedStep { step: 2, began: 0, seconds: 1.0, spans: &[], boundaries: &log.rows() };
        let trace = Trace::decode(&recorded.encode()[..]).unwrap();
        let segments = slices(&trace.packet, SEGMENTS);
        let names: Vec<_> = segments.iter().map(|slice| slice.0.as_str()).collect();
        assert_eq!(names, ["forward 0", "forward 1", "end"]);
        let events = trace.packet.iter().filter_map(|p| p.track_event.as_ref());
        let counted: Vec<i64> = events.filter_map(|event| event.counter_value).collect();
        // what does not change is not repeated
        assert_eq!(counted, [0, 64, 0]);
        let descriptors = trace.packet.iter().filter_map(|p| p.track_descriptor.as_ref());
        let named: Vec<_> = descriptors.filter_map(|d| d.name.as_deref()).collect();
        assert_eq!(named, ["memory: gradients (policy, device)"]);
    }
}
