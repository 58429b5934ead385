//! Actions of the keys.

use super::state::LiveState;
use super::steering::Steering;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// Action of a key for the owner of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing more.
    None,
    /// Leave the view; the run continues in its own process.
    Leave,
    /// End the run as a signal does: soon with a checkpoint, or at once.
    Interrupt,
    /// End the program at once.
    EndNow,
    /// Suspend the program, as Ctrl-Z does elsewhere.
    Suspend,
}

/// Handles a key. Without steering, the run is in another process or has ended.
pub fn press(key: KeyEvent, state: &mut LiveState, steering: Option<&Steering>) -> Action {
    if key.kind == KeyEventKind::Release {
        return Action::None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match (key.code, steering) {
            (KeyCode::Char('c'), Some(_)) => Action::Interrupt,
            (KeyCode::Char('c'), None) => Action::Leave,
            (KeyCode::Char('z'), _) => Action::Suspend,
            _ => Action::None,
        };
    }
    if state.confirms_end {
        return confirm_end(key.code, state, steering);
    }
    match key.code {
        KeyCode::Char('n') | KeyCode::Right => state.next_sample(),
        KeyCode::Char('?' | 'h') | KeyCode::F(1) => state.help ^= true,
        KeyCode::Esc => state.help = false,
        KeyCode::Char('q') if steering.is_none() => return Action::Leave,
        KeyCode::Char(key) => {
            if let Some(steering) = steering {
                steer(key, state, steering);
            }
        }
        _ => {}
    }
    if let Some(steering) = steering {
        state.requests = steering.requests();
    }
    Action::None
}

fn steer(key: char, state: &mut LiveState, steering: &Steering) {
    match key {
        'p' | ' ' => steering.toggle_pause(),
        's' => steering.save(),
        'q' if steering.requests().stopping => state.confirms_end = true,
        'q' => steering.stop(true),
        _ => {}
    }
}

/// Handles the answer to the question whether to end now.
fn confirm_end(key: KeyCode, state: &mut LiveState, steering: Option<&Steering>) -> Action {
    state.confirms_end = false;
    match (key, steering) {
        (KeyCode::Char('y'), Some(_)) => return Action::EndNow,
        (KeyCode::Char('c'), Some(steering)) => {
            steering.stop(false);
            state.requests = steering.requests();
        }
        _ => {}
    }
    Action::None
}
