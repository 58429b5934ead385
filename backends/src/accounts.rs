//! Bytes in use and their peaks by category.
//!
//! A backend's memory pool reports how much is in use, not for what. Code that keeps tensors across a phase or segment boundary
//! registers their bytes with [`Accounts::hold`]; dropping the [`MemoryGuard`] subtracts them again.

pub use firebrick_spec::{Category, Home};

use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Debug, Default)]
struct Cell {
    now: AtomicU64,
    peak: AtomicU64,
}

/// The memory accounts of one training run, shared by everything that allocates for it.
#[derive(Debug, Default)]
pub struct Accounts {
    cells: [[Cell; 2]; Category::ALL.len()],
}

/// The state of one account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Balance {
    /// What the bytes are held for.
    pub category: Category,
    /// Where.
    pub home: Home,
    /// Held now.
    pub bytes: u64,
    /// Most held since the start, or since [`Accounts::reset_peaks`].
    pub peak_bytes: u64,
}

impl Accounts {
    /// Empty accounts.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn cell(&self, category: Category, home: Home) -> &Cell {
        &self.cells[category as usize][home as usize]
    }

    /// Adds bytes to an account until the returned guard is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>, category: Category, home: Home, bytes: usize) -> MemoryGuard {
        let cell = self.cell(category, home);
        let bytes = bytes as u64;
        let now = cell.now.fetch_add(bytes, Relaxed) + bytes;
        cell.peak.fetch_max(now, Relaxed);
        MemoryGuard {
            accounts: Arc::clone(self),
            category,
            home,
            bytes,
        }
    }

    /// One account.
    #[must_use]
    pub fn balance(&self, category: Category, home: Home) -> Balance {
        let cell = self.cell(category, home);
        Balance {
            category,
            home,
            bytes: cell.now.load(Relaxed),
            peak_bytes: cell.peak.load(Relaxed),
        }
    }

    /// Every account with a peak above 0, the largest peak first.
    #[must_use]
    pub fn balances(&self) -> Vec<Balance> {
        let mut all: Vec<Balance> = Category::ALL
            .into_iter()
            .flat_map(|c| [self.balance(c, Home::Device), self.balance(c, Home::Host)])
            .filter(|b| b.peak_bytes > 0)
            .collect();
        all.sort_by_key(|b| std::cmp::Reverse(b.peak_bytes));
        all
    }

    /// Every account with bytes in use, the largest first.
    #[must_use]
    pub fn ranked(&self) -> Vec<Balance> {
        let mut live = self.balances();
        live.retain(|b| b.bytes > 0);
        live.sort_by_key(|b| std::cmp::Reverse(b.bytes));
        live
    }

    /// Sets peaks to what is held now.
    pub fn reset_peaks(&self) {
        for cell in self.cells.iter().flatten() {
            cell.peak.store(cell.now.load(Relaxed), Relaxed);
        }
    }
}

/// Bytes registered in an account; subtracted when dropped.
#[derive(Debug)]
pub struct MemoryGuard {
    accounts: Arc<Accounts>,
    category: Category,
    home: Home,
    bytes: u64,
}

impl MemoryGuard {
    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        let cell = self.accounts.cell(self.category, self.home);
        cell.now.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_outlives_the_holds_that_made_it() {
        let accounts = Accounts::new();
        let first = accounts.hold(Category::KeptInputs, Home::Device, 100);
        let second = accounts.hold(Category::KeptInputs, Home::Device, 50);
        drop(first);
        let balance = accounts.balance(Category::KeptInputs, Home::Device);
        assert_eq!((balance.bytes, balance.peak_bytes), (50, 150));
        accounts.reset_peaks();
        drop(second);
        let balance = accounts.balance(Category::KeptInputs, Home::Device);
        assert_eq!((balance.bytes, balance.peak_bytes), (0, 50));
        assert_eq!(accounts.balances().len(), 1);
    }
}
