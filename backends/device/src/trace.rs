//! Profiling: spans that cost one read of a flag while nothing is recorded.
//!
//! A recording has the spans of one thread. Spans nest: phases contain segments, which contain kernels. GPU work is
//! asynchronous: while a recording runs, a span with a device synchronises with it at its end, so that it includes the
//! device's time. Without a recording nothing waits.

use burn::tensor::Device;
use serde::Serialize;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// True if any thread ever recorded. Spares other threads the access to their thread-local state.
static ANYBODY: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

#[derive(Debug)]
struct Recording {
    origin: Instant,
    spans: Vec<SpanRecord>,
    depth: usize,
}

/// One span of a recording. Times are seconds since its start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpanRecord {
    /// Name: a phase, a segment's pass, a family of kernels.
    pub name: &'static str,
    /// When it began.
    pub start: f64,
    /// Duration in seconds, including nested spans.
    pub seconds: f64,
    /// Number of enclosing spans.
    pub depth: usize,
    /// Floating-point operations, without those of nested spans; 0 where they are not counted.
    pub flops: f64,
}

/// A running span; it ends when dropped.
#[derive(Debug)]
#[must_use = "a span ends when it is dropped"]
pub struct Span {
    /// Its index in the recording, if there is one.
    place: Option<usize>,
    device: Option<Device>,
}

/// Begins a span. `flops` counts the floating-point operations outside nested spans; 0 where they are not counted.
#[inline]
pub fn span(name: &'static str, flops: f64) -> Span {
    let place = ANYBODY.load(Relaxed).then(|| begin(name, flops)).flatten();
    Span { place, device: None }
}

/// Begins a span that synchronises with a device at its end while a recording runs.
pub fn span_on(name: &'static str, device: &Device) -> Span {
    let mut span = span(name, 0.0);
    span.device = span.place.map(|_| device.clone());
    span
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        if let Some(device) = &self.device {
            // an error of the device is reported by the next read of a tensor
            let _ = device.sync();
        }
        RECORDING.with_borrow_mut(|recording| {
            if let Some(recording) = recording {
                let now = recording.origin.elapsed().as_secs_f64();
                recording.depth -= 1;
                let span = &mut recording.spans[place];
                span.seconds = now - span.start;
            }
        });
    }
}

fn begin(name: &'static str, flops: f64) -> Option<usize> {
    RECORDING.with_borrow_mut(|recording| {
        let recording = recording.as_mut()?;
        let start = recording.origin.elapsed().as_secs_f64();
        let depth = recording.depth;
        recording.depth += 1;
        recording.spans.push(SpanRecord { name, start, seconds: 0.0, depth, flops });
        Some(recording.spans.len() - 1)
    })
}

/// Starts recording this thread's spans. Discards a running recording.
pub fn record() {
    ANYBODY.store(true, Relaxed);
    RECORDING.set(Some(Recording { origin: Instant::now(), spans: Vec::new(), depth: 0 }));
}

/// Ends this thread's recording: its spans in the order in which they began.
pub fn finish() -> Vec<SpanRecord> {
    RECORDING.take().map_or_else(Vec::new, |r| r.spans)
}

/// Takes this thread's recording, for another thread that continues it.
pub fn detach() -> Option<DetachedRecording> {
    let anybody = ANYBODY.load(Relaxed);
    anybody.then(|| RECORDING.take()).flatten().map(DetachedRecording)
}

/// Continues another thread's recording on this one.
pub fn attach(recording: Option<DetachedRecording>) {
    if let Some(DetachedRecording(recording)) = recording {
        RECORDING.set(Some(recording));
    }
}

/// A recording on its way between two threads.
#[derive(Debug)]
pub struct DetachedRecording(Recording);

/// The totals of all spans of one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SpanTotal {
    /// Number of spans.
    pub calls: u64,
    /// Seconds, without nested spans.
    pub own_seconds: f64,
    /// Seconds, with nested spans.
    pub seconds: f64,
    /// Floating-point operations.
    pub flops: f64,
}

/// Totals by name, in order of first appearance.
pub fn totals_by_name(spans: &[SpanRecord]) -> Vec<(&'static str, SpanTotal)> {
    let mut totals: Vec<(&'static str, SpanTotal)> = Vec::new();
    // index in the totals of the span that is open at each depth
    let mut open: Vec<usize> = Vec::new();
    for span in spans {
        let place = totals.iter().position(|(name, _)| *name == span.name);
        let place = place.unwrap_or_else(|| {
            totals.push((span.name, SpanTotal::default()));
            totals.len() - 1
        });
        let total = &mut totals[place].1;
        total.calls += 1;
        total.own_seconds += span.seconds;
        total.seconds += span.seconds;
        total.flops += span.flops;
        open.truncate(span.depth);
        if let Some(&parent) = open.last() {
            totals[parent].1.own_seconds -= span.seconds;
        }
        open.push(place);
    }
    totals
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_recorded_until_somebody_asks() {
        drop(span("before", 1.0));
        record();
        {
            let _outer = span("outer", 0.0);
            drop(span("inner", 2.0));
            drop(span("inner", 3.0));
        }
        let spans = finish();
        drop(span("after", 1.0));
        let names: Vec<_> = spans.iter().map(|s| (s.name, s.depth)).collect();
        assert_eq!(names, [("outer", 0), ("inner", 1), ("inner", 1)]);
        assert!(finish().is_empty());
    }

    #[test]
    fn own_seconds_exclude_nested_spans() {
        let at = |name, start, seconds, depth| SpanRecord { name, start, seconds, depth, flops: 1.0 };
        let spans = [
            at("step", 0.0, 10.0, 0),
            at("layer", 1.0, 4.0, 1),
            at("product", 1.0, 3.0, 2),
            at("layer", 5.0, 2.0, 1),
            at("step", 10.0, 1.0, 0),
        ];
        let totals = totals_by_name(&spans);
        let of = |name| &totals.iter().find(|(n, _)| *n == name).expect("there").1;
        assert!((of("step").own_seconds - 5.0).abs() < 1e-12);
        assert!((of("layer").own_seconds - 3.0).abs() < 1e-12);
        assert!((of("product").own_seconds - 3.0).abs() < 1e-12);
        assert_eq!((of("step").calls, of("layer").calls), (2, 2));
        assert!((of("layer").flops - 2.0).abs() < 1e-12);
    }
}
