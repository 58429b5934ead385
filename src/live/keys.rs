//! What the keys do.

use super::state::LiveState;
use super::steering::Steering;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What a key asks of whoever shows the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing more.
    None,
    /// Leave the view; the run continues in its own process.
    Leave,
    /// End the program at once, as Ctrl-C does elsewhere.
    EndNow,
    /// Stop the program until it is brought back, as Ctrl-Z does elsewhere.
    Suspend,
}

/// Does what a key says. Without steering the run is in another process, or has ended.
pub fn press(key: KeyEvent, state: &mut LiveState, steering: Option<&Steering>) -> Act {
    if key.kind == KeyEventKind::Release {
        return Act::None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match (key.code, steering) {
            (KeyCode::Char('c'), Some(_)) => Act::EndNow,
            (KeyCode::Char('c'), None) => Act::Leave,
            (KeyCode::Char('z'), _) => Act::Suspend,
            _ => Act::None,
        };
    }
    if state.asking {
        return answer(key.code, state, steering);
    }
    match key.code {
        KeyCode::Char('n') | KeyCode::Right => state.next_sample(),
        KeyCode::Char('?' | 'h') | KeyCode::F(1) => state.help ^= true,
        KeyCode::Esc => state.help = false,
        KeyCode::Char('q') if steering.is_none() => return Act::Leave,
        KeyCode::Char(key) => {
            if let Some(steering) = steering {
                steer(key, state, steering);
            }
        }
        _ => {}
    }
    if let Some(steering) = steering {
        state.asked = steering.asked();
    }
    Act::None
}

fn steer(key: char, state: &mut LiveState, steering: &Steering) {
    match key {
        'p' | ' ' => steering.toggle_pause(),
        's' => steering.save(),
        'q' if steering.asked().stopping => state.asking = true,
        'q' => steering.stop(true),
        _ => {}
    }
}

/// The answer to: end now?
fn answer(key: KeyCode, state: &mut LiveState, steering: Option<&Steering>) -> Act {
    state.asking = false;
    match (key, steering) {
        (KeyCode::Char('y'), Some(_)) => return Act::EndNow,
        (KeyCode::Char('c'), Some(steering)) => {
            steering.stop(false);
            state.asked = steering.asked();
        }
        _ => {}
    }
    Act::None
}
