//! A setting of a thread while some work runs.

use std::cell::Cell;
use std::thread::LocalKey;

/// Runs `work` with a setting of this thread at a value, and then sets it back, also after a panic.
pub(crate) fn with<T: Copy + 'static, R>(setting: &'static LocalKey<Cell<T>>, value: T, work: impl FnOnce() -> R) -> R {
    struct Restore<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy> Drop for Restore<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(setting, setting.replace(value));
    work()
}
