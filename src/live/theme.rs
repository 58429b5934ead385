//! Colors, and their replacements without colors.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders};

/// Styles of the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    colour: bool,
}

/// Characters and colors of phases in a bar; distinguishable without colors.
const FILLS: [(char, Color); 8] = [
    ('█', Color::Cyan),
    ('▒', Color::Yellow),
    ('▓', Color::Magenta),
    ('░', Color::Green),
    ('▚', Color::Blue),
    ('▤', Color::Red),
    ('▥', Color::LightCyan),
    ('▦', Color::LightYellow),
];

impl Theme {
    /// With colors.
    pub const COLOUR: Self = Self { colour: true };
    /// Without colors: with `NO_COLOR`, and in pictures.
    pub const PLAIN: Self = Self { colour: false };

    /// The theme by the environment.
    pub fn from_environment() -> Self {
        let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if is_plain { Self::PLAIN } else { Self::COLOUR }
    }

    fn coloured(self, colour: Color, without: Modifier) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new().add_modifier(without) }
    }

    /// Important names and values.
    pub fn strong(self) -> Style {
        self.coloured(Color::Reset, Modifier::empty()).add_modifier(Modifier::BOLD)
    }

    /// Labels.
    pub fn label(self) -> Style {
        self.coloured(Color::DarkGray, Modifier::empty())
    }

    /// Warnings.
    pub fn warning(self) -> Style {
        self.coloured(Color::Yellow, Modifier::BOLD)
    }

    /// Curves of training.
    pub fn training(self) -> Style {
        self.coloured(Color::Cyan, Modifier::empty())
    }

    /// Curves of validation.
    pub fn validation(self) -> Style {
        self.coloured(Color::Yellow, Modifier::empty())
    }

    /// Draws a section's heading above a line; returns the area below it.
    pub fn section<'t>(self, frame: &mut Frame<'_>, area: Rect, heading: impl Into<Line<'t>>) -> Rect {
        let block = Block::new().borders(Borders::TOP).border_style(self.label()).title(heading);
        let inner = block.inner(area);
        frame.render_widget(block, area);
        inner
    }

    /// Character and style of a part of a bar.
    pub fn fill(self, at: usize) -> (char, Style) {
        let (fill, colour) = FILLS[at % FILLS.len()];
        (fill, self.coloured(colour, Modifier::empty()))
    }
}
