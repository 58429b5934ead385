//! Bytes in use and their peaks by category.
//!
//! A backend's memory pool reports how much is in use, not for what. Code that keeps tensors across a phase or segment
//! boundary registers their bytes with [`Accounts::hold`]; dropping the [`MemoryGuard`] subtracts them again.

pub use firebrick_spec::{Account, Category, Home, Role};

use crate::allocation_trace;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Debug, Default)]
struct Cell {
    now: AtomicU64,
    peak: AtomicU64,
}

/// Bytes of all models of a run.
#[derive(Debug, Default)]
struct Books {
    cells: [[Cell; 2]; Category::ALL.len()],
    /// Bytes of each model, by [`Account::index`].
    by_model: [[[AtomicU64; Home::ALL.len()]; Category::ALL.len()]; Role::ALL.len()],
}

/// The memory accounts of one training run, shared by everything that allocates for it. Bytes are registered for one
/// model: the policy, unless [`for_model`](Self::for_model) says otherwise.
#[derive(Debug)]
pub struct Accounts {
    books: Arc<Books>,
    model: Role,
}

/// The state of one account, all models together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Balance {
    /// Category of the bytes.
    pub category: Category,
    /// Placement of the bytes.
    pub home: Home,
    /// Held now.
    pub bytes: u64,
    /// Most held since the start, or since [`Accounts::reset_peaks`].
    pub peak_bytes: u64,
}

impl Books {
    fn cell(&self, category: Category, home: Home) -> &Cell {
        &self.cells[category as usize][home as usize]
    }

    fn of(&self, account: Account) -> &AtomicU64 {
        let Account { category, home, model } = account;
        &self.by_model[model as usize][category as usize][home as usize]
    }
}

impl Accounts {
    /// Empty accounts.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { books: Arc::default(), model: Role::Policy })
    }

    /// These accounts, registering bytes for this model.
    pub fn for_model(&self, model: Role) -> Arc<Self> {
        Arc::new(Self { books: Arc::clone(&self.books), model })
    }

    /// Adds bytes to an account until the returned guard is dropped.
    #[must_use]
    pub fn hold(self: &Arc<Self>, category: Category, home: Home, bytes: usize) -> MemoryGuard {
        let account = Account { category, home, model: self.model };
        let cell = self.books.cell(category, home);
        let bytes = bytes as u64;
        let now = cell.now.fetch_add(bytes, Relaxed) + bytes;
        cell.peak.fetch_max(now, Relaxed);
        self.books.of(account).fetch_add(bytes, Relaxed);
        MemoryGuard { trace_key: allocation_trace::held(account, bytes), accounts: Arc::clone(self), account, bytes }
    }

    /// Bytes held now by every account, by [`Account::index`].
    pub fn held(&self) -> impl Iterator<Item = u64> {
        let cells = self.books.by_model.iter().flatten().flatten();
        cells.map(|bytes| bytes.load(Relaxed))
    }

    /// One account.
    pub fn balance(&self, category: Category, home: Home) -> Balance {
        let cell = self.books.cell(category, home);
        Balance { category, home, bytes: cell.now.load(Relaxed), peak_bytes: cell.peak.load(Relaxed) }
    }

    /// Every account with a peak above 0, the largest peak first.
    pub fn balances(&self) -> Vec<Balance> {
        let mut balances: Vec<Balance> = Category::ALL
            .into_iter()
            .flat_map(|c| [self.balance(c, Home::Device), self.balance(c, Home::Host)])
            .filter(|b| b.peak_bytes > 0)
            .collect();
        balances.sort_by_key(|b| std::cmp::Reverse(b.peak_bytes));
        balances
    }

    /// Every account with bytes in use, the largest first.
    pub fn ranked(&self) -> Vec<Balance> {
        let mut live = self.balances();
        live.retain(|b| b.bytes > 0);
        live.sort_by_key(|b| std::cmp::Reverse(b.bytes));
        live
    }

    /// Sets peaks to what is held now.
    pub fn reset_peaks(&self) {
        for cell in self.books.cells.iter().flatten() {
            cell.peak.store(cell.now.load(Relaxed), Relaxed);
        }
    }
}

/// Bytes registered in an account; subtracted when dropped.
#[derive(Debug)]
pub struct MemoryGuard {
    accounts: Arc<Accounts>,
    account: Account,
    bytes: u64,
    /// Its key in the trace; `None` if it was not traced.
    trace_key: Option<u64>,
}

impl MemoryGuard {
    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        let account = self.account;
        let cell = self.accounts.books.cell(account.category, account.home);
        cell.now.fetch_sub(self.bytes, Relaxed);
        self.accounts.books.of(account).fetch_sub(self.bytes, Relaxed);
        if let Some(key) = self.trace_key {
            allocation_trace::released(key, account, self.bytes);
        }
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

    #[test]
    fn what_models_hold_adds_up_to_the_balance() {
        let policy = Accounts::new();
        let critic = policy.for_model(Role::Critic);
        let held = |model| {
            let account = Account { category: Category::Moments, home: Home::Host, model };
            policy.held().nth(account.index())
        };
        let moments = policy.hold(Category::Moments, Home::Host, 30);
        let other = critic.hold(Category::Moments, Home::Host, 12);
        assert_eq!((held(Role::Policy), held(Role::Critic)), (Some(30), Some(12)));
        assert_eq!(policy.balance(Category::Moments, Home::Host).bytes, 42);
        drop(moments);
        assert_eq!((held(Role::Policy), held(Role::Critic)), (Some(0), Some(12)));
        drop(other);
        assert_eq!(policy.held().sum::<u64>(), 0);
    }
}
