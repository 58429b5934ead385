//! Pages of documentation: the code blocks of Markdown and reStructuredText.

use super::error::ImportError;

/// A code block of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CodeBlock {
    /// The line that opens it, from 1: its text begins in the next.
    pub line: usize,
    /// The line that it ends in.
    pub end: usize,
    /// The language that it is said to be in; empty where none is.
    pub language: String,
    /// Its text without the page's indentation.
    pub text: String,
}

/// How a block ends.
enum Until {
    /// At a line that begins with this fence.
    Fence(String),
    /// At the first line that is indented no deeper than this.
    Indent(usize),
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The language and the end of a block that a line opens, which comes after another.
fn opens(line: &str, before: &str) -> Option<(String, Until)> {
    let own = line.trim_start();
    for sign in ['`', '~'] {
        let fence: String = own.chars().take_while(|c| *c == sign).collect();
        let said = &own[fence.len()..];
        // a line with code in it, ```like this```, is a line of text, and tildes below a line make that a heading
        let underlines = sign == '~' && said.trim().is_empty() && !before.trim().is_empty();
        if fence.len() >= 3 && !said.contains(sign) && !underlines {
            let word = said.trim_start_matches(['{', ' ']);
            let word = word.split([' ', '}', ',', ':']).next().unwrap_or_default();
            return Some((word.to_ascii_lowercase(), Until::Fence(fence)));
        }
    }
    let directive = [".. code-block::", ".. code::", ".. sourcecode::"];
    let said = directive.iter().find_map(|own_directive| own.strip_prefix(own_directive))?;
    Some((said.trim().to_ascii_lowercase(), Until::Indent(indent(line))))
}

/// All code blocks of a page.
pub(super) fn blocks(text: &str) -> Vec<CodeBlock> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let before = at.checked_sub(1).map_or("", |before| lines[before]);
        let Some((language, until)) = opens(lines[at], before) else {
            at += 1;
            continue;
        };
        let first = at + 1;
        let ends = |line: &&str| match &until {
            Until::Fence(fence) => line.trim_start().starts_with(fence.as_str()),
            Until::Indent(outer) => !line.trim().is_empty() && indent(line) <= *outer,
        };
        let len = lines[first..].iter().position(ends);
        let end = len.map_or(lines.len(), |len| first + len);
        found.push(CodeBlock { line: at + 1, end, language, text: without_indent(&lines[first..end]) });
        at = match until {
            Until::Fence(_) => end + 1,
            Until::Indent(_) => end,
        };
    }
    found
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

/// The block with settings that a page has: the one at a line of the page, or the only one.
pub(super) fn chosen(
    file: &str,
    blocks: &[CodeBlock],
    line: Option<usize>,
    has_settings: impl Fn(&CodeBlock) -> bool,
) -> Result<CodeBlock, ImportError> {
    let telling: Vec<&CodeBlock> = blocks.iter().filter(|block| has_settings(block)).collect();
    let listed = || {
        let each = telling.iter().map(|block| match block.language.as_str() {
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
    match telling[..] {
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
                telling.len(),
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
        let found = blocks(page);
        let told: Vec<(usize, &str, &str)> =
            found.iter().map(|own| (own.line, own.language.as_str(), own.text.as_str())).collect();
        assert_eq!(
            told,
            [
                (5, "yaml", "a: 1\n  b: 2\n"),
                (10, ".python", "c = 3\n"),
                (13, "bash", "\nrun \\\n  d=4\n\n"),
                (19, "", "last\n"),
            ]
        );
    }
}
