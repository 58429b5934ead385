//! The help on keys and numbers.

use super::state::LiveState;
use super::theme::Theme;
use firebrick::engine::config::Mode;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Wrap};

const STEERING: [(&str, &str); 4] = [
    ("p", "pause after this step, or continue"),
    ("s", "write a checkpoint after this step"),
    ("q", "stop after this step, with a checkpoint; twice: ask"),
    ("Ctrl-C", "the same if the step ends soon, else end now; twice: now"),
];

const LEAVING: [(&str, &str); 1] = [("q", "leave; the run continues")];

const LOOKING: [(&str, &str); 2] = [("n", "next sample of the newest step"), ("?", "close this help")];

const RL: [(&str, &str); 6] = [
    ("reward", "mean of the step; its change over the last 10"),
    ("validation", "mean of greedy completions of held-out prompts"),
    ("truncated", "completions that ended at the length limit"),
    ("no spread", "groups whose rewards are all equal: no gradient"),
    ("entropy", "of the policy, in nats a token"),
    ("mismatch", "mean difference of the sampler's and the trainer's probabilities"),
];

const SFT: [(&str, &str); 3] = [
    ("loss", "mean of the step's tokens; its change over the last 10"),
    ("validation", "loss of held-out examples"),
    ("rate", "learning rate"),
];

/// Draws the help over the middle of the view.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &LiveState, theme: Theme) {
    let keys: &[(&str, &str)] = if state.watching { &LEAVING } else { &STEERING };
    let numbers: &[(&str, &str)] = match state.run.mode {
        Mode::Rl => &RL,
        Mode::Sft => &SFT,
    };
    let line = |(name, text): &(&'static str, &'static str)| {
        Line::from(vec![Span::styled(format!("{name:<12}"), theme.strong()), Span::raw(*text)])
    };
    let keys = keys.iter().chain(&LOOKING).map(line);
    let lines = keys.chain([Line::default()]).chain(numbers.iter().map(line));
    let lines: Vec<Line<'_>> = lines.collect();
    let width = area.width.min(80);
    let height = (lines.len() as u16 + 2).min(area.height);
    let over = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    frame.render_widget(Clear, over);
    let help = Paragraph::new(lines).wrap(Wrap { trim: false }).block(Block::bordered().title(" help "));
    frame.render_widget(help, over);
}
