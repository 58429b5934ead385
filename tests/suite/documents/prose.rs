//! Words of the documents, of `--help` (which `docs/reference/cli.md` is generated from) and of messages; and status,
//! which is on `docs/reference/support.md` only.

use super::{documents, lines, read};
use crate::support::project;
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use regex::Regex;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A word that is not used, and its replacement.
struct Word {
    pattern: Regex,
    replacement: String,
}

fn words() -> Vec<Word> {
    let table = read(&project().join("docs/internals/words.tsv"));
    let rows = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    let words = rows.map(|row| {
        let (word, replacement) = row.split_once('\t').unwrap_or_else(|| panic!("no tab in {row:?}"));
        let pattern = Regex::new(&format!(r"(?i)(?:^|[^\w-])(?:{word})(?:$|[^\w-])")).expect("a pattern");
        Word { pattern, replacement: replacement.to_owned() }
    });
    words.collect()
}

/// Text without code spans and without the targets of links.
fn prose(text: &str) -> String {
    let mut kept = String::new();
    for (at, part) in text.split('`').enumerate() {
        kept.push_str(if at % 2 == 0 { part } else { " " });
    }
    let links = Regex::new(r"\]\([^)]*\)").expect("a pattern");
    links.replace_all(&kept, "]").into_owned()
}

/// The words of a text that are not used, each with its replacement.
fn unused<'w>(words: &'w [Word], text: &str) -> impl Iterator<Item = String> + use<'w> {
    let text = prose(text);
    words.iter().filter_map(move |word| {
        let found = word.pattern.find(&text)?.as_str().trim_matches(|c: char| !c.is_alphanumeric()).to_owned();
        Some(format!("{found:?}: use {}", word.replacement))
    })
}

#[test]
fn pages_use_the_words_of_the_field() {
    let words = words();
    let mut wrong = Vec::new();
    for page in documents() {
        let text = read(&page);
        let outside = lines(&text).enumerate().filter(|(_, (fenced, _))| !fenced);
        for (at, (_, line)) in outside {
            let place = format!("{}:{}", page.strip_prefix(project()).unwrap_or(&page).display(), at + 1);
            wrong.extend(unused(&words, line).map(|what| format!("{place}: {what}: {line}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Rust files below a folder whose strings are messages: not tests, benches and examples.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let skipped = ["tests", "tests.rs", "benches", "examples", "reference", "test_support.rs"];
        if skipped.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// String literals of code: documentation and modules of tests are skipped.
fn literals(tokens: TokenStream, found: &mut Vec<String>) {
    let mut is_test = false;
    let mut before_attribute = false;
    for token in tokens {
        match token {
            TokenTree::Punct(mark) => {
                // `#[…]` and `#![…]`
                before_attribute = mark.as_char() == '#' || before_attribute && mark.as_char() == '!';
                is_test &= mark.as_char() != ';';
            }
            TokenTree::Group(group) if before_attribute && group.delimiter() == Delimiter::Bracket => {
                before_attribute = false;
                let text = group.stream().to_string();
                is_test |= text == "cfg (test)" || text == "cfg(test)";
                // messages of errors are attributes: `#[error("…")]`
                if text.starts_with("error") {
                    literals(group.stream(), found);
                }
            }
            TokenTree::Group(group) => {
                before_attribute = false;
                if !(is_test && group.delimiter() == Delimiter::Brace) {
                    literals(group.stream(), found);
                }
                is_test &= group.delimiter() != Delimiter::Brace;
            }
            TokenTree::Literal(literal) => {
                let source = literal.to_string();
                // a raw string is code of another language
                if let (Ok(text), false) = (syn::parse_str::<syn::LitStr>(&source), source.starts_with('r')) {
                    found.push(text.value());
                }
            }
            TokenTree::Ident(_) => before_attribute = false,
        }
    }
}

/// The strings of code, or the sentences of a table of the import.
fn messages(file: &Path) -> Vec<String> {
    let text = read(file);
    if file.extension().is_some_and(|end| end == "txt") {
        let verbs = "not_needed|cannot|lacks|wrong|off_or_wrong|built_in";
        let sentence = Regex::new(&format!(r"(?m)(?:^[A-Z_0-9]+:| --| (?:{verbs})|^- \S+ ) (.*)$")).expect("a pattern");
        return sentence.captures_iter(&text).map(|own| own[1].to_owned()).collect();
    }
    let tokens = TokenStream::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut found = Vec::new();
    literals(tokens, &mut found);
    found
}

#[test]
fn messages_use_the_words_of_the_field() {
    let words = words();
    let placeholder = Regex::new(r"\{[^{}]*\}").expect("a pattern");
    let pages = Regex::new(r"\bdocs/[a-z_/]+\.md").expect("a pattern");
    let mut files = Vec::new();
    for folder in ["src", "engine", "models/src", "backends"] {
        sources(&project().join(folder), &mut files);
    }
    let tables = project().join("engine/import/rules");
    let tables = std::fs::read_dir(&tables).unwrap_or_else(|e| panic!("{}: {e}", tables.display()));
    files.extend(tables.map(|entry| entry.expect("an entry").path()));
    let (mut wrong, mut checked) = (Vec::new(), 0);
    for file in files {
        for text in messages(&file) {
            for page in pages.find_iter(&text).filter(|page| !project().join(page.as_str()).exists()) {
                wrong.push(format!("{}: there is no {}", file.display(), page.as_str()));
            }
            let bare = placeholder.replace_all(&text, " ");
            if prose(&bare).split_whitespace().count() < 3 {
                continue;
            }
            checked += 1;
            let place = file.strip_prefix(project()).unwrap_or(&file).display();
            wrong.extend(unused(&words, &bare).map(|what| format!("{place}: {what}: {text}")));
        }
    }
    assert!(wrong.is_empty(), "{} messages:\n{}", wrong.len(), wrong.join("\n"));
    assert!(checked > 1500, "only {checked} messages were found");
}

#[test]
fn a_word_is_found_in_prose_and_in_messages_and_not_in_code() {
    let words = words();
    let found = |text: &str| unused(&words, text).count();
    assert_eq!(found("It shares out the weights of a card."), 2);
    assert_eq!(found("Set `alone` or [a page](alone.md)."), 0);
    let code = r#"
        /// Documentation says what stands alone.
        #[error("the card is alone")]
        struct A;
        fn f() { bail!("weights lie \
            on a card") }
        #[cfg(test)]
        mod tests { fn g() { panic!("alone on a card") } }
        fn h() { let s = "after the tests"; }
    "#;
    let mut literal = Vec::new();
    literals(TokenStream::from_str(code).unwrap(), &mut literal);
    assert_eq!(literal, ["the card is alone", "weights lie on a card", "after the tests"]);
}

/// What a page may not say, since `docs/reference/support.md` says it; results and dates are in `BENCHMARKS.md`.
const STATUS: &str = r"(?i)\bno (real )?GPUs? ha[sv]e?\b|\bnot (yet|tried)\b|\buntested\b|\bnever (been )?(run|tried)\b|\bha(s|ve) (not )?been (measured|tried|run)\b|\b(was|were) measured\b|\b[HAB][12]00\b|\b20\d\d-\d\d-\d\d\b|\bllvmpipe\b|\bsoftware (driver|Vulkan)\b";

/// Places of a page that state what has run on what.
fn status(text: &str) -> Vec<String> {
    let pattern = Regex::new(STATUS).expect("a pattern");
    let outside = lines(text).enumerate().filter(|(_, (fenced, _))| !fenced);
    let found = outside.filter_map(|(at, (_, line))| {
        let said = prose(line);
        let found = pattern.find(&said)?;
        Some(format!("{}: {:?}: {line}", at + 1, found.as_str()))
    });
    found.collect()
}

#[test]
fn status_is_on_the_support_page_only() {
    let mut wrong = Vec::new();
    for page in documents() {
        let owners = ["docs/reference/support.md", "BENCHMARKS.md", "README.md"];
        if owners.iter().any(|owner| page.ends_with(owner)) {
            continue;
        }
        wrong.extend(status(&read(&page)).into_iter().map(|said| format!("{}:{said}", page.display())));
    }
    let readme = read(&project().join("README.md"));
    let (before, rest) = readme.split_once("<!-- status: ").expect("a table of status");
    let (_, after) = rest.split_once("<!-- end of status -->").expect("the end of a table of status");
    for part in [before, after] {
        let said = status(part).into_iter().filter(|said| !said.contains("BENCHMARKS.md"));
        wrong.extend(said.map(|said| format!("README.md: {said}")));
    }
    assert!(wrong.is_empty(), "the support page says it (docs/reference/support.yaml):\n{}", wrong.join("\n"));
}

#[test]
fn a_second_place_of_status_is_found() {
    for said in [
        "No real GPU has been measured.",
        "CUDA: not yet on a GPU.",
        "An H200 ran all tests.",
        "Since 2026-11-26 it works.",
        "Metal has not been tried.",
    ] {
        assert_eq!(status(said).len(), 1, "{said}");
    }
    for right in ["It needs no GPU.", "`H200` is a name of the profile.", "A run on a GPU compiles kernels."] {
        assert!(status(right).is_empty(), "{right}");
    }
}

/// Most words of the README, of the user's pages and of all pages, as `wc -w` counts.
const MOST_WORDS: [usize; 3] = [700, 30_000, 45_000];

#[test]
fn documents_are_short() {
    let count = |path: &Path| read(path).split_whitespace().count();
    let readme = count(&project().join("README.md"));
    let docs = project().join("docs");
    let (mut user, mut all) = (readme, 0);
    for page in documents() {
        let words = count(&page);
        all += words;
        let shelf = page.strip_prefix(&docs).ok().and_then(|path| path.components().next());
        let is_user =
            shelf.is_some_and(|shelf| ["learn", "guides", "reference"].iter().any(|name| shelf.as_os_str() == *name));
        user += if is_user { words } else { 0 };
    }
    // pages outside the book
    for page in ["tests/fixtures/README.md", "vendor/cubecl-llvm/README.md"] {
        all += count(&project().join(page));
    }
    let found = [readme, user, all];
    let fits = found.iter().zip(MOST_WORDS).all(|(found, most)| *found <= most);
    assert!(fits, "words of the README, of the user's pages, of all pages: {found:?}, of at most {MOST_WORDS:?}");
}
