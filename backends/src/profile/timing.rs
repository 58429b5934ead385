//! Duration of work on a device.

use crate::{Error, Result};
use burn::tensor::Tensor;
use std::time::{Duration, Instant};

/// Each number is measured for about this long, in each round.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// Runs `work` until time is up, after one run that does not count: seconds a run. Reading one number waits for the
/// device.
pub(super) fn seconds(mut work: impl FnMut() -> Tensor<2>) -> Result<f64> {
    let wait = |t: Tensor<2>| -> Result<()> {
        t.slice([0..1, 0..1]).try_into_data().map(|_| ()).map_err(|e| Error::device(&e))
    };
    wait(work())?;
    let (started, mut runs) = (Instant::now(), 0);
    while started.elapsed() < PATIENCE || runs == 0 {
        // several in the queue, so that waiting is not what is timed
        let mut last = work();
        for _ in 0..3 {
            last = work();
        }
        wait(last)?;
        runs += 4;
    }
    Ok(started.elapsed().as_secs_f64() / f64::from(runs))
}
