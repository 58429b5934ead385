//! Plain text tables.

use std::fmt::Write;

/// Rows of cells under a header: the first columns are text and aligned left, the others are numbers and aligned right.
pub struct Table {
    rows: Vec<Vec<String>>,
    text_columns: usize,
    ends_with_text: bool,
}

impl Table {
    /// A table whose first `text_columns` columns are text.
    pub fn new(text_columns: usize, header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|&s| s.to_owned()).collect()], text_columns, ends_with_text: false }
    }

    /// Makes the last column text.
    pub fn ends_with_text(mut self) -> Self {
        self.ends_with_text = true;
        self
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Adds rows.
    pub fn rows(mut self, rows: impl Iterator<Item = Vec<String>>) -> Self {
        self.rows.extend(rows);
        self
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
                let is_last = c + 1 == columns;
                let is_text = c < self.text_columns || (self.ends_with_text && is_last);
                let _ = if is_text { write!(line, "{gap}{cell:<width$}") } else { write!(line, "{gap}{cell:>width$}") };
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
        assert_eq!(table.render(), "NAME      BYTES\na             1\nlonger  1000000\n");
    }

    #[test]
    fn the_last_column_may_be_text() {
        let mut table = Table::new(0, &["BYTES", "WHERE"]).ends_with_text();
        table.row(vec!["1".into(), "a".into()]);
        table.row(vec!["1000000".into(), "there and back".into()]);
        assert_eq!(table.render(), "  BYTES  WHERE\n      1  a\n1000000  there and back\n");
    }
}
