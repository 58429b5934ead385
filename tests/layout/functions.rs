//! How long functions are, in text that rustfmt has laid out: a function ends at the brace below its `fn`.

/// The functions of a source text outside its tests, and the lines of each from its `fn` to its closing brace.
pub fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        if line.starts_with("mod tests {") {
            at = end(&lines, at);
        } else if let Some(name) = name(line) {
            let own = end(&lines, at) - at + 1;
            found.push((name.to_owned(), own));
        }
        at += 1;
    }
    found
}

/// The name of the function whose signature begins on a line.
fn name(line: &str) -> Option<&str> {
    let (before, rest) = line.trim_start().split_once("fn ")?;
    let words = ["pub", "pub(super)", "pub(crate)", "const", "unsafe", "async", "extern", "\"C\""];
    let qualifies = |word: &str| words.contains(&word) || word.starts_with("pub(in");
    let name = rest.split(['(', '<']).next()?;
    (before.split_whitespace().all(qualifies) && !name.is_empty()).then_some(name)
}

/// The line that ends the block or the declaration that begins on a line.
fn end(lines: &[&str], start: usize) -> usize {
    let indent = lines[start].len() - lines[start].trim_start().len();
    let closes = |line: &&str| {
        let depth = line.len() - line.trim_start().len();
        depth == indent && (line.trim_start().starts_with('}') || line.ends_with(';'))
    };
    if lines[start].ends_with(['}', ';']) {
        return start;
    }
    let rest = lines[start + 1..].iter().position(closes);
    rest.map_or(lines.len() - 1, |n| start + 1 + n)
}
