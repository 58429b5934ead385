//! The terminal: taken by the view, and given back whatever ends it.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use std::io::{IsTerminal, Stdout, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// The terminal that is drawn on.
pub type CrosstermTerminal = Terminal<CrosstermBackend<Stdout>>;

/// Whether the terminal is in the view's hands.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Whether the program was stopped, and continues.
static WENT_ON: AtomicBool = AtomicBool::new(false);

/// Held while something is written to the terminal, so that nothing is drawn after it was given back.
static WRITING: Mutex<()> = Mutex::new(());

/// Whether a view can be shown: stdout is a terminal that can move its cursor, this program is in its foreground, and
/// nobody reads a log of it, as CI does.
pub fn can_show() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
    stdout().is_terminal() && !dumb && !ci && is_foreground()
}

/// Whether the terminal listens to this program: a program in the background that changes its mode is stopped.
fn is_foreground() -> bool {
    // 52 (name) S parent group session terminal foreground-group …; not told outside Linux
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = fields.split_whitespace().collect();
    match (fields.get(2), fields.get(5)) {
        (Some(own), Some(foreground)) => own == foreground,
        _ => true,
    }
}

/// Takes the terminal.
pub fn take() -> std::io::Result<CrosstermTerminal> {
    enter()?;
    Terminal::new(CrosstermBackend::new(stdout())).inspect_err(|_| restore())
}

fn enter() -> std::io::Result<()> {
    let guard = writing();
    enable_raw_mode()?;
    TAKEN.store(true, Ordering::SeqCst);
    let entered = execute!(stdout(), EnterAlternateScreen, Hide);
    drop(guard);
    entered.inspect_err(|_| restore())
}

/// Takes it again where the program was stopped and continues in the foreground. Says whether the view has the
/// terminal, and whether it has it again.
pub fn taken_again() -> std::io::Result<(bool, bool)> {
    if is_taken() {
        return Ok((true, false));
    }
    // what gave the terminal back may also be about to end the program
    if !WENT_ON.load(Ordering::SeqCst) || !is_foreground() {
        return Ok((false, false));
    }
    WENT_ON.store(false, Ordering::SeqCst);
    enter()?;
    Ok((true, true))
}

/// Whether the terminal is in the view's hands.
fn is_taken() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

/// Writes to the terminal unless it was given back.
pub fn write(work: impl FnOnce() -> std::io::Result<()>) -> std::io::Result<()> {
    let _guard = writing();
    if is_taken() { work() } else { Ok(()) }
}

/// Gives the terminal back, if it was taken. May be called from any thread, and twice.
pub fn restore() {
    let _guard = writing();
    if TAKEN.swap(false, Ordering::SeqCst) {
        // a terminal that is gone needs nothing
        let _ = execute!(stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

/// Waits for whoever writes, but not for ever: a terminal may be stopped.
fn writing() -> Option<MutexGuard<'static, ()>> {
    for _ in 0..100 {
        match WRITING.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    None
}

#[cfg(unix)]
mod signals {
    use super::{WENT_ON, restore};
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::{emulate_default_handler, raise};
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;

    static HANDLED: OnceLock<bool> = OnceLock::new();

    /// From now on a signal that ends or stops the program gives the terminal back first. The thread stays for the
    /// program's life: once a signal is handled, only this thread can do what it did before.
    pub fn handle() -> bool {
        *HANDLED.get_or_init(|| {
            let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP]) else {
                return false;
            };
            let thread = std::thread::Builder::new().name("signals".into());
            let spawned = thread.spawn(move || {
                for signal in &mut signals {
                    restore();
                    // ends the program, or stops it here until it continues
                    let _ = emulate_default_handler(signal);
                    WENT_ON.store(true, Ordering::SeqCst);
                }
            });
            spawned.is_ok()
        })
    }

    /// Ends the program as Ctrl-C does.
    pub fn interrupt() {
        restore();
        let _ = raise(SIGINT);
    }

    /// Stops the program as Ctrl-Z does.
    pub fn suspend() {
        restore();
        let _ = raise(SIGTSTP);
    }
}

#[cfg(not(unix))]
mod signals {
    /// Ctrl-C is a key of the view.
    pub fn handle() -> bool {
        true
    }

    /// Ends the program as Ctrl-C does.
    pub fn interrupt() {
        super::restore();
        std::process::exit(130);
    }

    /// There is nothing like Ctrl-Z.
    pub fn suspend() {}
}

pub use signals::{handle, interrupt, suspend};
