//! The terminal: taken over by the view, and restored on every exit.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use std::io::{IsTerminal, Stdout, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// The terminal of the view.
pub type CrosstermTerminal = Terminal<CrosstermBackend<Stdout>>;

/// True while the view has the terminal.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// True after the program was stopped and continued.
static CONTINUED: AtomicBool = AtomicBool::new(false);

/// Held during writes to the terminal, so that nothing is drawn after its restoration.
static WRITING: Mutex<()> = Mutex::new(());

/// Returns true if a view can be shown: stdout is a terminal with a movable cursor, this program is in its foreground,
/// and its output is no log, as in CI.
pub fn can_show() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
    stdout().is_terminal() && !dumb && !ci && is_foreground()
}

/// Returns true if the program is in the foreground; a background program that changes the terminal's mode is stopped.
fn is_foreground() -> bool {
    // 52 (name) S parent group session terminal foreground-group …; unknown outside Linux
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = fields.split_whitespace().collect();
    match (fields.get(2), fields.get(5)) {
        (Some(group), Some(foreground)) => group == foreground,
        _ => true,
    }
}

/// Takes over the terminal.
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

/// Takes over the terminal again after the program was stopped and continues in the foreground. Returns whether the
/// view has the terminal, and whether it was retaken.
pub fn retake() -> std::io::Result<(bool, bool)> {
    if is_taken() {
        return Ok((true, false));
    }
    // the restoration may be part of the program's end
    if !CONTINUED.load(Ordering::SeqCst) || !is_foreground() {
        return Ok((false, false));
    }
    CONTINUED.store(false, Ordering::SeqCst);
    enter()?;
    Ok((true, true))
}

/// Lets the view take over the terminal again: the program was stopped and continues.
pub fn continued() {
    CONTINUED.store(true, Ordering::SeqCst);
}

/// Returns true while the view has the terminal.
fn is_taken() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

/// Writes to the terminal unless it was restored.
pub fn write(work: impl FnOnce() -> std::io::Result<()>) -> std::io::Result<()> {
    let _guard = writing();
    if is_taken() { work() } else { Ok(()) }
}

/// Restores the terminal, if it was taken. Callable from any thread, repeatedly.
pub fn restore() {
    let _guard = writing();
    if TAKEN.swap(false, Ordering::SeqCst) {
        // a closed terminal needs nothing
        let _ = execute!(stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

/// Waits for other writers, but not forever: a terminal may be stopped.
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
