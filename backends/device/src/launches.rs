//! Watching the kernels that a thread launches on a GPU: those of this crate and Burn's own.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

thread_local! {
    static COUNTS: RefCell<Option<LaunchCounts>> = const { RefCell::new(None) };
    static LOOK: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Launches by the name of the kernel, without its generic parameters and the path of its crate.
pub type LaunchCounts = BTreeMap<String, u64>;

/// Result of `work`, and the kernels that this thread launched meanwhile. A graph that is replayed launches none; on
/// the CPU there are none. A count inside of another one takes its launches away from it.
pub fn count<R>(work: impl FnOnce() -> R) -> (R, LaunchCounts) {
    watch();
    let before = COUNTS.replace(Some(LaunchCounts::new()));
    let result = work();
    let counts = COUNTS.replace(before).unwrap_or_default();
    (result, counts)
}

/// Result of `work`, with `look` run before every launch that this thread asks for. By then the memory that the
/// kernel writes has been asked for, and what it reads is still held: so readings of the pools see all that lives at
/// once. On the CPU it never runs. `look` may launch nothing.
pub fn before_each<R>(look: impl Fn() + 'static, work: impl FnOnce() -> R) -> R {
    watch();
    let before = LOOK.replace(Some(Rc::new(look)));
    let result = work();
    LOOK.set(before);
    result
}

/// All launches together.
pub fn total(counts: &LaunchCounts) -> u64 {
    counts.values().sum()
}

#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
fn watch() {}

/// Has `CubeCL` tell of every launch from now on, on the thread that asks for it.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn watch() {
    use cubecl::logging::{LaunchObservation, LaunchObserver};
    use std::sync::{Arc, OnceLock};

    struct ByThread;

    impl LaunchObserver for ByThread {
        fn launched(&self, kernel: &'static str) {
            COUNTS.with_borrow_mut(|counts| {
                if let Some(counts) = counts {
                    *counts.entry(short(kernel)).or_default() += 1;
                }
            });
            let look = LOOK.with_borrow(Clone::clone);
            if let Some(look) = look {
                look();
            }
        }
    }

    // There is one place for an observer in a process, so it stays: a launch on a thread that does not count costs a
    // look at a flag.
    static WATCHING: OnceLock<LaunchObservation> = OnceLock::new();
    WATCHING.get_or_init(|| LaunchObservation::new(Arc::new(ByThread)));
}

/// The last two parts of a type's path, without generic parameters.
#[cfg(any(test, feature = "wgpu", feature = "cuda"))]
fn short(kernel: &str) -> String {
    let path = kernel.split('<').next().unwrap_or(kernel);
    let mut parts: Vec<&str> = path.rsplit("::").take(2).collect();
    parts.reverse();
    parts.join("::")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_named_by_the_last_two_parts_of_its_path() {
        let name = "a::cube::norm::normalise::Normalise<f32, a::B<c::D>>";
        assert_eq!(short(name), "normalise::Normalise");
        assert_eq!(short("plain"), "plain");
    }

    #[test]
    fn nothing_is_launched_where_nothing_runs() {
        let (result, counts) = count(|| 3);
        assert_eq!((result, total(&counts)), (3, 0));
    }
}
