//! Bytes by category, and the moments of a phase at which they are counted.

use firebrick_spec::{Category, Home};
use std::collections::BTreeMap;
use std::ops::{Add, AddAssign};

const CATEGORIES: usize = Category::ALL.len();

/// Bytes by category in one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally([u64; CATEGORIES]);

impl Tally {
    /// Sum over the categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Bytes of one category.
    #[must_use]
    pub fn get(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// Empties one category.
    pub(super) fn clear(&mut self, category: Category) {
        self.0[category as usize] = 0;
    }

    /// Categories that hold something, by name.
    #[must_use]
    pub fn named(&self) -> BTreeMap<Category, u64> {
        let held = Category::ALL.into_iter().map(|c| (c, self.get(c)));
        held.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

impl Add for Tally {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        for (a, b) in self.0.iter_mut().zip(other.0) {
            *a += b;
        }
        self
    }
}

/// Bytes held at one moment, on the device and on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// On the device.
    pub device: Tally,
    /// On the host.
    pub host: Tally,
}

impl Held {
    /// The same and `bytes` more.
    #[must_use]
    pub fn and(mut self, home: Home, category: Category, bytes: u64) -> Self {
        let tally = match home {
            Home::Device => &mut self.device,
            Home::Host => &mut self.host,
        };
        tally.0[category as usize] += bytes;
        self
    }

    /// The same and `bytes` more on the device.
    #[must_use]
    pub fn on_device(self, category: Category, bytes: u64) -> Self {
        self.and(Home::Device, category, bytes)
    }

    /// The same and `bytes` more on the host.
    #[must_use]
    pub fn on_host(self, category: Category, bytes: u64) -> Self {
        self.and(Home::Host, category, bytes)
    }
}

impl AddAssign for Held {
    fn add_assign(&mut self, other: Self) {
        self.device = self.device + other.device;
        self.host = self.host + other.host;
    }
}

impl Add for Held {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

/// Collects the moments of a phase and keeps the worst of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Worst {
    /// Host and device are one memory.
    unified: bool,
    /// Device bytes at the worst moment; with unified memory the host's are among them.
    pub device: Tally,
    /// Host bytes at the host's own worst moment.
    pub host: Tally,
    /// What goes on at the worst moment.
    pub moment: &'static str,
}

impl Worst {
    pub fn new(unified: bool) -> Self {
        Self {
            unified,
            device: Tally::default(),
            host: Tally::default(),
            moment: "",
        }
    }

    pub fn see(&mut self, moment: &'static str, held: Held) {
        let device = if self.unified {
            held.device + held.host
        } else {
            held.device
        };
        if device.total() > self.device.total() || self.moment.is_empty() {
            self.device = device;
            self.moment = moment;
        }
        if held.host.total() > self.host.total() {
            self.host = held.host;
        }
    }
}
