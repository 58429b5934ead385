//! Bytes by category, at one moment of a phase and at its peak.

use firebrick_spec::{Category, Home};
use std::collections::BTreeMap;
use std::ops::{Add, AddAssign};

const CATEGORIES: usize = Category::ALL.len();

/// Bytes by category in one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CategoryBytes([u64; CATEGORIES]);

impl CategoryBytes {
    /// Sum over the categories.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Bytes of one category.
    pub fn get(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// Empties one category.
    pub(crate) fn clear(&mut self, category: Category) {
        self.0[category as usize] = 0;
    }

    /// Categories that hold something, by name.
    pub fn named(&self) -> BTreeMap<Category, u64> {
        let bytes = Category::ALL.into_iter().map(|c| (c, self.get(c)));
        bytes.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

impl Add for CategoryBytes {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a += b;
        }
        self
    }
}

/// Bytes in use at one moment, on the device and on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// On the device.
    pub device: CategoryBytes,
    /// On the host.
    pub host: CategoryBytes,
}

impl MemoryUsage {
    /// Adds `bytes`.
    pub fn and(mut self, home: Home, category: Category, bytes: u64) -> Self {
        let bytes_of = match home {
            Home::Device => &mut self.device,
            Home::Host => &mut self.host,
        };
        bytes_of.0[category as usize] += bytes;
        self
    }

    /// Adds `bytes` on the device.
    pub fn on_device(self, category: Category, bytes: u64) -> Self {
        self.and(Home::Device, category, bytes)
    }

    /// Takes `bytes` off the device.
    pub fn off_device(mut self, category: Category, bytes: u64) -> Self {
        self.device.0[category as usize] -= bytes;
        self
    }

    /// Adds `bytes` on the host.
    pub fn on_host(self, category: Category, bytes: u64) -> Self {
        self.and(Home::Host, category, bytes)
    }
}

impl AddAssign for MemoryUsage {
    fn add_assign(&mut self, other: Self) {
        self.device = self.device + other.device;
        self.host = self.host + other.host;
    }
}

impl Add for MemoryUsage {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

/// Takes the usage at each moment of a phase and keeps the peak.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeakUsage {
    /// Host and device are one memory.
    unified: bool,
    /// Device bytes at the peak; with unified memory the host's are among them.
    pub device: CategoryBytes,
    /// Host bytes at the host's own peak.
    pub host: CategoryBytes,
    /// The work at the peak.
    pub moment: &'static str,
}

impl PeakUsage {
    pub fn new(unified: bool) -> Self {
        Self { unified, device: CategoryBytes::default(), host: CategoryBytes::default(), moment: "" }
    }

    /// Adds what is held all the time.
    pub fn add_throughout(&mut self, usage: MemoryUsage) {
        self.host = self.host + usage.host;
        self.device = self.device + usage.device;
        if self.unified {
            self.device = self.device + usage.host;
        }
    }

    pub fn record(&mut self, moment: &'static str, usage: MemoryUsage) {
        let device = if self.unified { usage.device + usage.host } else { usage.device };
        if device.total() > self.device.total() || self.moment.is_empty() {
            self.device = device;
            self.moment = moment;
        }
        if usage.host.total() > self.host.total() {
            self.host = usage.host;
        }
    }
}
