//! Pages of documentation: the code blocks of Markdown and reStructuredText.

use super::error::{ImportError, ImportResult};

/// A code block of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CodeBlock {
    /// The line that opens it, from 1: its text begins in the next.
    pub line: usize,
    /// The line that it ends in.
    pub end: usize,
    /// Declared language; empty if none.
    pub language: String,
    /// Its text without the page's indentation.
    pub text: String,
}

/// End of a block.
enum BlockEnd {
    /// A line that begins with this fence.
    Fence(String),
    /// The first line that is indented no deeper than this.
    Indent(usize),
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The language and end of a block that a line opens; `before` is the line before it.
fn opens(line: &str, before: &str) -> Option<(String, BlockEnd)> {
    let trimmed = line.trim_start();
    for sign in ['`', '~'] {
        let fence: String = trimmed.chars().take_while(|c| *c == sign).collect();
        let rest = &trimmed[fence.len()..];
        // a line with code in it, ```like this```, is a line of text, and tildes below a line make that a heading
        let underlines = sign == '~' && rest.trim().is_empty() && !before.trim().is_empty();
        if fence.len() >= 3 && !rest.contains(sign) && !underlines {
            let word = rest.trim_start_matches(['{', ' ']);
            let word = word.split([' ', '}', ',', ':']).next().unwrap_or_default();
            return Some((word.to_ascii_lowercase(), BlockEnd::Fence(fence)));
        }
    }
    let directives = [".. code-block::", ".. code::", ".. sourcecode::"];
    let rest = directives.iter().find_map(|directive| trimmed.strip_prefix(directive))?;
    Some((rest.trim().to_ascii_lowercase(), BlockEnd::Indent(indent(line))))
}

/// All code blocks of a page.
pub(super) fn blocks(text: &str) -> Vec<CodeBlock> {
    let lines: Vec<&str> = text.lines().collect();
    let mut blocks = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let before = at.checked_sub(1).map_or("", |before| lines[before]);
        let Some((language, until)) = opens(lines[at], before) else {
            at += 1;
            continue;
        };
        let first = at + 1;
        let ends = |line: &&str| match &until {
            BlockEnd::Fence(fence) => line.trim_start().starts_with(fence.as_str()),
            BlockEnd::Indent(outer) => !line.trim().is_empty() && indent(line) <= *outer,
        };
        let len = lines[first..].iter().position(ends);
        let end = len.map_or(lines.len(), |len| first + len);
        blocks.push(CodeBlock { line: at + 1, end, language, text: without_indent(&lines[first..end]) });
        at = match until {
            BlockEnd::Fence(_) => end + 1,
            BlockEnd::Indent(_) => end,
        };
    }
    blocks
}

/// Lines less the spaces that all of them begin with. Blank lines stay, so that lines keep their numbers.
fn without_indent(lines: &[&str]) -> String {
    let filled = lines.iter().filter(|line| !line.trim().is_empty());
    let common = filled.map(|line| indent(line)).min().unwrap_or(0);
    let mut text = String::new();
    for line in lines {
        text.push_str(line.get(common..).unwrap_or_default());
        text.push('\n');
    }
    text
}

/// Selects the code block with settings: the one at `line`, or the only one.
pub(super) fn select(
    file: &str,
    blocks: &[CodeBlock],
    line: Option<usize>,
    has_settings: impl Fn(&CodeBlock) -> bool,
) -> ImportResult<CodeBlock> {
    let candidates: Vec<&CodeBlock> = blocks.iter().filter(|block| has_settings(block)).collect();
    let listed = || {
        let each = candidates.iter().map(|block| match block.language.as_str() {
            "" => block.line.to_string(),
            language => format!("{} ({language})", block.line),
        });
        each.collect::<Vec<_>>().join(", ")
    };
    if let Some(line) = line {
        let inside = |block: &&CodeBlock| (block.line..=block.end + 1).contains(&line);
        return blocks.iter().find(inside).cloned().ok_or_else(|| {
            let detail =
                format!("there is no code block at this line; code blocks with settings begin in lines {}", listed());
            ImportError::at(file, Some(line), detail)
        });
    }
    match candidates[..] {
        [only] => Ok(only.clone()),
        [] => Err(ImportError::at(
            file,
            None,
            "is a page, and none of its code blocks has settings that can be read: put them into a separate file, \
             .yaml, .json, .py or .sh according to their format",
        )),
        [first, ..] => Err(ImportError::at(
            file,
            None,
            format!(
                "is a page with {} code blocks that have settings, and a run has one configuration; name the line of one, as in {file}:{}. \
                 They begin in lines {}",
                candidates.len(),
                first.line,
                listed()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_with_their_lines_and_without_the_pages_indentation() {
        let page = "# Title\n~~~~~~~\nText with ```code``` in it.\n\n```yaml\na: 1\n  b: 2\n```\n- entry\n  ~~~{.python .x}\n  c = 3\n  ~~~\n\
                    .. code-block:: bash\n\n   run \\\n     d=4\n\nText.\n```\nlast";
        let blocks_found = blocks(page);
        let actual: Vec<(usize, &str, &str)> =
            blocks_found.iter().map(|own| (own.line, own.language.as_str(), own.text.as_str())).collect();
        assert_eq!(
            actual,
            [
                (5, "yaml", "a: 1\n  b: 2\n"),
                (10, ".python", "c = 3\n"),
                (13, "bash", "\nrun \\\n  d=4\n\n"),
                (19, "", "last\n"),
            ]
        );
    }
}
