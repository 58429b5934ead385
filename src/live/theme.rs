//! Colours, and what stands for them where there are none.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders};

/// How things look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    colour: bool,
}

/// What a phase's part of the bar is drawn with: all can be told apart without colours.
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
    /// With colours.
    pub const COLOUR: Self = Self { colour: true };
    /// Without: where `NO_COLOR` is set to anything, and in pictures.
    pub const PLAIN: Self = Self { colour: false };

    /// The theme that the environment asks for.
    pub fn of_environment() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if refused { Self::PLAIN } else { Self::COLOUR }
    }

    fn coloured(self, colour: Color, without: Modifier) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new().add_modifier(without) }
    }

    /// Names and values that are looked for first.
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

    /// Draws a section's heading above a line, and gives the area below it.
    pub fn section<'t>(self, frame: &mut Frame<'_>, area: Rect, heading: impl Into<Line<'t>>) -> Rect {
        let block = Block::new().borders(Borders::TOP).border_style(self.label()).title(heading);
        let inner = block.inner(area);
        frame.render_widget(block, area);
        inner
    }

    /// What a part of a bar is filled with.
    pub fn fill(self, at: usize) -> (char, Style) {
        let (fill, colour) = FILLS[at % FILLS.len()];
        (fill, self.coloured(colour, Modifier::empty()))
    }
}
