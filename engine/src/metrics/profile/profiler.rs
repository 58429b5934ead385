//! Profiler of steps of a run.

use super::tracks::{RecordedStep, head};
use crate::checkpoint::RunDir;
use crate::executor::BoundaryLog;
use firebrick_backends::allocator::without_peak;
use firebrick_backends::trace;
use std::fs::OpenOptions;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Traces some steps of a run into `profile.pftrace`, which <https://ui.perfetto.dev> opens: phases, passes, copies and
/// kernels as nested slices, segments between their boundaries, and memory by account as counters.
///
/// While a step is traced, the run waits for the device at the ends of phases and passes, so that their slices include
/// its time; slices of single kernels and boundaries are as the host sees them. Other steps pay nothing.
#[derive(Debug)]
pub struct Profiler {
    log: Arc<BoundaryLog>,
    steps: Range<u64>,
    /// The traced step that runs, and its start.
    running: Option<(u64, Instant)>,
    /// Start of the first traced step.
    origin: Option<Instant>,
    failed: bool,
}

impl Profiler {
    /// Name of the trace in the run folder.
    pub const FILE: &str = "profile.pftrace";

    /// Traces `count` steps of a session that runs those after `remaining.start` up to `remaining.end`. Skips the first
    /// if there are more: kernels are compiled in it, and memory is touched for the first time.
    pub fn new(log: &Arc<BoundaryLog>, count: u64, remaining: Range<u64>) -> Self {
        let is_longer = remaining.end.saturating_sub(remaining.start) > count;
        let first = remaining.start + 1 + u64::from(is_longer);
        Self {
            log: Arc::clone(log),
            steps: first..first.saturating_add(count),
            running: None,
            origin: None,
            failed: false,
        }
    }

    /// Begins a step. Returns true if it is traced, so that its boundaries are needed.
    pub fn begin_step(&mut self, step: u64) -> bool {
        let traced = self.steps.contains(&step);
        if traced {
            let now = Instant::now();
            self.origin.get_or_insert(now);
            self.running = Some((step, now));
            trace::record();
        }
        traced
    }

    /// Ends a step, which may have failed, and adds it to the trace. If that fails, the run continues with a warning.
    pub fn end_step(&mut self, run: &RunDir) {
        let (Some((step, began)), Some(origin)) = (self.running.take(), self.origin) else {
            return;
        };
        let seconds = began.elapsed().as_secs_f64();
        let spans = trace::finish();
        let path = run.path().join(Self::FILE);
        let is_first = began == origin;
        let written = without_peak(|| {
            let recorded = RecordedStep {
                step,
                began: began.duration_since(origin).as_nanos() as u64,
                seconds,
                spans: &spans,
                boundaries: &self.log.rows(),
            };
            write(&path, is_first, &recorded.encode())
        });
        if let Err(error) = written
            && !self.failed
        {
            self.failed = true;
            tracing::warn!("the profile in {} is not complete, the run continues: {error}", path.display());
        }
    }
}

/// Starts the trace's file, or appends to it.
fn write(path: &Path, is_first: bool, step: &[u8]) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    if is_first {
        let mut file = options.write(true).create(true).truncate(true).open(path)?;
        file.write_all(&head())?;
        return file.write_all(step);
    }
    options.append(true).open(path)?.write_all(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::accounts::Accounts;

    #[test]
    fn the_first_step_is_left_out_where_there_are_more() {
        let log = BoundaryLog::new(&Accounts::new(), None);
        let traced = |wanted, left: Range<u64>| -> Vec<u64> {
            let profiler = Profiler::new(&log, wanted, left.clone());
            let steps = left.start + 1..left.end + 1;
            steps.filter(|step| profiler.steps.contains(step)).collect()
        };
        assert_eq!(traced(2, 0..10), [2, 3]);
        assert_eq!(traced(2, 5..10), [7, 8]);
        assert_eq!(traced(3, 0..3), [1, 2, 3]);
        assert_eq!(traced(9, 0..3), [1, 2, 3]);
        assert_eq!(traced(0, 0..3), [0_u64; 0]);
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_costs_the_trace_alone() {
        let temp = tempfile::tempdir().unwrap();
        let run = RunDir::create(&temp.path().join("run"), "output: x\n").unwrap();
        std::fs::create_dir(run.path().join(Profiler::FILE)).unwrap();
        let log = BoundaryLog::new(&Accounts::new(), None);
        let mut profiler = Profiler::new(&log, 2, 0..2);
        assert!(profiler.begin_step(1));
        profiler.end_step(&run);
        assert!(profiler.failed);
        assert!(profiler.begin_step(2));
        profiler.end_step(&run);
        assert!(!profiler.begin_step(3));
        // a step that is not traced records nothing
        drop(trace::span("after", 0.0));
        assert!(trace::finish().is_empty());
    }
}
