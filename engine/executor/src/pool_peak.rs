//! The largest readings of a device's pools since a phase began: pools count what is in use, and keep no peak of it.

use firebrick_backends::memory::{Reading, ReadingSource};

/// Most bytes that readings of the pools have found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolPeak {
    /// Most bytes in use.
    pub in_use_bytes: u64,
    /// Most bytes reserved, free pages among them.
    pub reserved_bytes: u64,
}

/// A running maximum of readings.
#[derive(Debug, Default)]
pub(super) struct RunningPeak(Option<PoolPeak>);

impl RunningPeak {
    /// Begins again.
    pub fn reset(&mut self) {
        self.0 = None;
    }

    /// Takes a reading of the pools into account, and gives it with the peak so far. Readings of other sources stay as
    /// they are: the counted heap has a peak of its own.
    pub fn raise(&mut self, reading: Reading) -> Reading {
        if reading.source != ReadingSource::BurnPool {
            return reading;
        }
        let before = self.0.unwrap_or_default();
        let peak = PoolPeak {
            in_use_bytes: before.in_use_bytes.max(reading.in_use_bytes),
            reserved_bytes: before.reserved_bytes.max(reading.reserved_bytes),
        };
        self.0 = Some(peak);
        Reading { peak_bytes: Some(peak.in_use_bytes), ..reading }
    }

    /// The peak so far; `None` if no pool was read.
    pub fn get(&self) -> Option<PoolPeak> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(source: ReadingSource, in_use_bytes: u64, reserved_bytes: u64) -> Reading {
        Reading { source, in_use_bytes, reserved_bytes, peak_bytes: None }
    }

    #[test]
    fn the_peak_is_the_largest_reading_since_the_phase_began() {
        let mut peak = RunningPeak::default();
        assert_eq!(peak.get(), None);
        let peaks: Vec<_> = [(5, 8), (9, 16), (2, 16), (7, 4)]
            .map(|(in_use, reserved)| peak.raise(of(ReadingSource::BurnPool, in_use, reserved)))
            .iter()
            .map(|reading| (reading.in_use_bytes, reading.peak_bytes))
            .collect();
        let expected = [(5, Some(5)), (9, Some(9)), (2, Some(9)), (7, Some(9))];
        assert_eq!(peaks, expected);
        let expected = PoolPeak { in_use_bytes: 9, reserved_bytes: 16 };
        assert_eq!(peak.get(), Some(expected));
        peak.reset();
        let _ = peak.raise(of(ReadingSource::BurnPool, 3, 16));
        assert_eq!(peak.get().map(|peak| peak.in_use_bytes), Some(3));
    }

    #[test]
    fn a_source_with_a_peak_of_its_own_keeps_it() {
        let mut peak = RunningPeak::default();
        let heap = Reading { peak_bytes: Some(50), ..of(ReadingSource::CountedHeap, 5, 5) };
        assert_eq!(peak.raise(heap), heap);
        assert_eq!(peak.get(), None);
    }
}
