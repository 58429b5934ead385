//! The drawing loop: it handles updates and keys.

use super::keys::{Action, press};
use super::state::LiveState;
use super::steering::Steering;
use super::terminal::{self, CrosstermTerminal};
use super::theme::Theme;
use super::view::draw;
use crate::{output, signals};
use firebrick::backends::device::panic_message;
use firebrick::report::ViewUpdate;
use ratatui::crossterm::event::{self, Event};
use std::io::{IsTerminal, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for a key, and of updates.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Interval of redrawing an unchanged state, for its clock.
const REDRAW_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the updates since the last call, and may change the state; `None` after the last ones.
pub type UpdateSource = Box<dyn FnMut(&mut LiveState) -> anyhow::Result<Option<Vec<ViewUpdate>>> + Send>;

/// A view that a separate thread draws.
pub struct Screen {
    thread: Option<JoinHandle<()>>,
    over: Arc<AtomicBool>,
}

impl Screen {
    /// Takes over the terminal and starts drawing.
    pub fn start(
        state: LiveState,
        source: UpdateSource,
        steering: Option<Arc<Steering>>,
        theme: Theme,
    ) -> std::io::Result<Self> {
        let console = take()?;
        let over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&over);
        let thread = std::thread::Builder::new().name("live view".into());
        let spawned = thread.spawn(move || {
            // a failure of the view must not end the run
            let drawn = catch_unwind(AssertUnwindSafe(|| {
                let steering = steering.as_deref();
                run(console, state, source, steering, theme, &end)
            }));
            terminal::restore();
            let failed = match drawn {
                Ok(Ok(())) => return,
                Ok(Err(error)) => format!("{error:#}"),
                Err(panic) => panic_message(panic.as_ref()),
            };
            output::message(&format!("warning: the live view ended, the run continues: {failed}"));
        });
        let thread = spawned.inspect_err(|_| terminal::restore())?;
        Ok(Self { thread: Some(thread), over })
    }

    /// Restores the terminal.
    pub fn leave(mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        terminal::restore();
    }
}

/// Shows a view until a key leaves it.
pub fn show(state: LiveState, source: UpdateSource, theme: Theme) -> anyhow::Result<()> {
    let console = take()?;
    let never = AtomicBool::new(false);
    let shown = catch_unwind(AssertUnwindSafe(|| run(console, state, source, None, theme, &never)));
    terminal::restore();
    match shown {
        Ok(shown) => shown,
        Err(panic) => Err(anyhow::anyhow!("the view failed: {}", panic_message(panic.as_ref()))),
    }
}

fn take() -> std::io::Result<CrosstermTerminal> {
    if !signals::handle() {
        return Err(std::io::Error::other("signals cannot be handled"));
    }
    terminal::take()
}

/// Draws until the view is left or over.
fn run(
    mut console: CrosstermTerminal,
    mut state: LiveState,
    mut source: UpdateSource,
    steering: Option<&Steering>,
    theme: Theme,
    over: &AtomicBool,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut drawn: Option<Instant> = None;
    let mut open = true;
    while !over.load(Ordering::Relaxed) {
        state.clock = began.elapsed();
        let mut changed = drawn.is_none_or(|at| at.elapsed() >= REDRAW_INTERVAL);
        if open {
            match source(&mut state)? {
                Some(updates) => {
                    changed |= !updates.is_empty();
                    for update in updates {
                        state.apply(update);
                    }
                }
                None => open = false,
            }
        }
        let (is_taken, resumed) = terminal::retake()?;
        if !is_taken {
            std::thread::sleep(POLL_INTERVAL);
            continue;
        }
        if resumed {
            console.clear()?;
            changed = true;
        }
        if let Some(steering) = steering {
            let requests = steering.requests();
            changed |= requests != state.requests;
            state.requests = requests;
        }
        if changed {
            terminal::write(|| console.draw(|frame| draw(frame, &state, theme)).map(drop))?;
            drawn = Some(Instant::now());
        }
        // crossterm never returns from the read of a terminal that is gone, so nothing waits there
        anyhow::ensure!(stdout().is_terminal(), "the terminal is gone");
        if event::poll(Duration::ZERO)? {
            let action = match event::read()? {
                Event::Key(key) => press(key, &mut state, steering),
                _ => Action::None,
            };
            // a key or a resize
            drawn = None;
            match action {
                Action::None => {}
                Action::Leave => return Ok(()),
                Action::Interrupt => signals::interrupt(false),
                Action::EndNow => signals::interrupt(true),
                Action::Suspend => signals::suspend(),
            }
        } else {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    Ok(())
}
