//! Plain text tables.

use std::fmt::Write;

/// Rows of cells under a header; the first column reads from the left, the others are numbers and stand right.
pub struct Table {
    rows: Vec<Vec<String>>,
    text_columns: usize,
}

impl Table {
    /// A table whose first `text_columns` columns are text.
    pub fn new(text_columns: usize, header: &[&str]) -> Self {
        Self {
            rows: vec![header.iter().map(|&s| s.to_owned()).collect()],
            text_columns,
        }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Lines with columns two spaces apart, none ending in a space.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(c));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (c, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = if c == 0 { "" } else { "  " };
                // writing to a string cannot fail
                let _ = if c < self.text_columns {
                    write!(line, "{gap}{cell:<width$}")
                } else {
                    write!(line, "{gap}{cell:>width$}")
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn text_stands_left_and_numbers_right() {
        let mut table = Table::new(1, &["NAME", "BYTES"]);
        table.row(vec!["a".into(), "1".into()]);
        table.row(vec!["longer".into(), "1000000".into()]);
        assert_eq!(
            table.render(),
            "NAME      BYTES\na             1\nlonger  1000000\n"
        );
    }
}
